"""A method's loss as the function that verl's workers call for each micro-batch.

The objective's coefficients already hold every normalisation, so micro-batches, padding rows and ranks need none: the
loss is a sum. Functions here are pickled into the workers and see every column of the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import no_padding_2_padding

from webagent_core.objectives import Objective, RowTensors, ValueTensors

# Our names of the log-probabilities that verl keeps. The policy that starts the update is the proximal one, and the
# one that played is the behaviour policy; in a synchronous run the two are equal but for rounding.
COLUMNS = {
    "old_logp": "old_log_probs",
    "prox_logp": "old_log_probs",
    "behave_logp": "rollout_log_probs",
    "ref_logp": "ref_log_prob",
}


def padded(data: TensorDict, name: str, width: int) -> Tensor:
    """A ragged column as (M, width), zeros behind each row's end."""
    column = data[name]
    if column.is_nested:
        column = column.to_padded_tensor(0.0)
    if column.size(1) < width:
        column = torch.nn.functional.pad(column, (0, width - column.size(1)))
    return column[:, :width]


def policy_loss(
    objective: Objective, model_output: dict[str, Any], data: TensorDict, dp_group: Any = None
) -> tuple[Tensor, dict[str, Metric]]:
    """`Objective.loss` over a micro-batch. verl averages gradients over `dp_size` ranks, hence the factor."""
    logp = no_padding_2_padding(model_output["log_probs"], data)
    width = logp.size(1)
    wanted = set(objective.required_logps) | {"old_logp"}
    logps = {
        ours: padded(data, verls, width) for ours, verls in COLUMNS.items() if ours in wanted and verls in data.keys()
    }
    rows = RowTensors(
        logp=logp,
        mask=padded(data, "response_mask", width).bool(),
        advantage=padded(data, "advantages", width),
        coefficient=data["loss_coefficient"].to(logp),
        **logps,
    )
    out = objective.loss(rows)
    loss = out.loss * data["dp_size"]
    return loss, _metrics(loss, out.metrics)


def value_loss(
    objective: Objective, model_output: dict[str, Any], data: TensorDict, dp_group: Any = None
) -> tuple[Tensor, dict[str, Metric]]:
    """`Objective.value_loss` over a micro-batch: of every token, or of the state before a row's first token."""
    outputs = no_padding_2_padding(model_output["values"], data)
    width = outputs.size(1)
    mask, target = padded(data, "response_mask", width).bool(), padded(data, "returns", width)
    coefficient = data["value_coefficient"].to(outputs)
    if objective.value_at == "state":
        first = mask.float().argmax(1, keepdim=True)  # a row without tokens of its own has coefficient 0
        outputs, target = outputs.gather(1, first).squeeze(1), target.gather(1, first).squeeze(1)
        values = ValueTensors(outputs=outputs, target=target, coefficient=coefficient)
    else:
        values = ValueTensors(outputs=outputs, target=target, coefficient=coefficient, mask=mask)
    out = objective.value_loss(values)
    loss = out.loss * data["dp_size"]
    return loss, _metrics(loss, out.metrics)


def _metrics(loss: Tensor, metrics: dict[str, Any]) -> dict[str, Metric]:
    """Sums and counts apart: verl adds micro-batches and averages ranks, so only their ratio is a mean."""
    sums = {"total_loss": loss.detach()}
    for name, metric in metrics.items():
        sums[f"{name}/sum"], sums[f"{name}/count"] = metric.sum, metric.count
    return {f"webagent/{name}": Metric(AggregationType.SUM, value) for name, value in sums.items()}


def token_means(metrics: dict[str, Any], kind: str) -> dict[str, Any]:
    """verl's metrics of an update with our sums and counts turned into means.

    Where there were several passes over the batch, their sums are added: the mean is over all of them, and
    `total_loss` becomes the first pass's `loss`.
    """
    prefix = f"{kind}/webagent/"
    ours = {name.removeprefix(prefix): metrics.pop(name) for name in list(metrics) if name.startswith(prefix)}
    means: dict[str, Any] = {}
    for name, value in ours.items():
        values = value if isinstance(value, list) else [value]
        if name == "total_loss":
            means[f"{kind}/loss"] = float(values[0])
        elif name.endswith("/sum"):
            counts = ours[name.removesuffix("sum") + "count"]
            count = sum(counts if isinstance(counts, list) else [counts])
            if count:
                means[f"{kind}/{name.removesuffix('/sum')}"] = float(sum(values)) / float(count)
    return metrics | means
