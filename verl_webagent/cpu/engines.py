"""verl's FSDP engines on CPU: actor, reference and critic, for text models and Qwen-VL ones.

Three things in verl's own engines ask for an accelerator: weights of a reference policy are kept in pinned memory, the
critic is built with flash attention, and FSDP1 copies the first rank's weights through the device. Two defaults are
for accelerators: autocast to bf16 (here fp32, unless the configuration says something) and torch.compile (here never).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForImageTextToText, AutoModelForTokenClassification, PretrainedConfig
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.utils.fsdp_utils import merged_lora_context, normalize_peft_param_name
from verl.utils.model import convert_weight_keys
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

FULL_PRECISION = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


class OnCPU:
    """What the engines below share. Raises ValueError for settings that do not run on CPU."""

    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config, **kwargs) -> None:
        if engine_config.strategy != "fsdp2":
            raise ValueError(f"strategy = {engine_config.strategy!r} does not run on CPU; allowed: 'fsdp2'")
        if model_config.use_remove_padding:
            raise ValueError("model.use_remove_padding = True needs flash attention; on CPU allowed: False")
        set_frozen(engine_config, "use_torch_compile", False)
        if engine_config.mixed_precision is None:
            set_frozen(engine_config, "mixed_precision", FULL_PRECISION)
        if model_config.hf_config._attn_implementation == "flash_attention_2":  # what verl asks for by default
            model_config.hf_config._attn_implementation = "sdpa"
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config, **kwargs)

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        # verl offloads a model that only runs forward to pinned CPU memory. It is in CPU memory already.
        forward_only, offload = self.engine_config.forward_only, self.engine_config.offload_policy
        set_frozen(self.engine_config, "forward_only", False)
        set_frozen(self.engine_config, "offload_policy", False)
        try:
            return super()._build_fsdp_module(module)
        finally:
            set_frozen(self.engine_config, "forward_only", forward_only)
            set_frozen(self.engine_config, "offload_policy", offload)


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")
class CPUEngineWithLMHead(OnCPU, FSDPEngineWithLMHead):
    def _merged_lora_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole weights with the adapters merged in, for the rollout. verl's own rounds them to bf16, and what played
        would not be what is trained."""
        with merged_lora_context(self.module, backup_adapters=True):
            named = convert_weight_keys(normalize_peft_param_name(self.module.state_dict()), self.module)
            for name, tensor in named.items():
                # A copy, as the context takes the adapters out of these tensors again.
                yield name, (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device="cpu")
class CPUEngineWithValueHead(OnCPU, FSDPEngineWithValueHead):
    def _build_module(self) -> torch.nn.Module:
        config = self.model_config.hf_config
        config.num_labels = 1
        config.classifier_dropout = config.summary_dropout_prob = 0.0
        config.hidden_dropout = "0"
        build = value_model_with_vision if hasattr(config, "vision_config") else value_model
        module = build(self.model_config.local_path, config, self.model_config.trust_remote_code)
        if self.model_config.enable_gradient_checkpointing:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return module


def value_model(path: str, config: PretrainedConfig, trust_remote_code: bool) -> torch.nn.Module:
    """A token classifier of one label: `logits` (rows, tokens, 1) are the values."""
    return AutoModelForTokenClassification.from_pretrained(
        path, config=config, dtype=torch.float32, trust_remote_code=trust_remote_code
    )


def value_model_with_vision(path: str, config: PretrainedConfig, trust_remote_code: bool) -> torch.nn.Module:
    """transformers has no token classifier that sees images: the language head is swapped for a scalar one.

    The new head starts at zero, so that the first values are 0 whatever the hidden states are.
    """
    module = AutoModelForImageTextToText.from_pretrained(
        path, config=config, dtype=torch.float32, trust_remote_code=trust_remote_code
    )
    module.lm_head = torch.nn.Linear(config.text_config.hidden_size, 1, bias=False)
    torch.nn.init.zeros_(module.lm_head.weight)
    apply_monkey_patch(model=module, use_remove_padding=False, ulysses_sp_size=1, use_fused_kernels=False)
    return module


def set_frozen(config: object, name: str, value: object) -> None:
    """verl's configuration objects refuse assignment; theirs is the only place where the engines look."""
    object.__setattr__(config, name, value)
