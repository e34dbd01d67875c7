"""AdamW and Muon over float32 master weights.

bf16 masters would not do: near 1.0 a bf16 step is 2^-8, an update of 6e-4 is rounded away, and every norm weight stays exactly 1. With
`optimizer.name muon` the matrices (fc too) follow Muon and the norm weights AdamW; on two cores it learned far faster than AdamW alone.
State is kept by parameter name, so a checkpoint does not depend on the order of parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from dflash_ray.config.schema import OptimizerConfig

MUON_MOMENTUM = 0.95
_EPS = 1e-8  # of AdamW, torch's default
# quintic iteration that drives singular values to about 1 in five rounds (Keller Jordan, Muon, 2024)
_QUINTIC, _ROUNDS = (3.4445, -4.7750, 2.0315), 5
_TOGETHER = 2**28  # values of matrices orthogonalised at one time: about 4 GiB of copies on a GPU

STATE_PARTS = ("exp_avg", "exp_avg_sq", "step", "momentum")


class Optimizer:
    """Moves float32 parameters, either by their `grad` (`step`) or, on a GPU with AdamW, in one pass (`step_in_one_pass`).

    `copies` are what matmuls read of some parameters, in another dtype; they are rewritten with every update.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        copies: Mapping[nn.Parameter, Tensor] | None = None,
    ):
        self.config = config
        self._copies = copies or {}
        self._names = {parameter: name for name, parameter in named_parameters}
        matrices = [parameter for parameter in self._names if parameter.dim() == 2]
        vectors = [parameter for parameter in self._names if parameter.dim() != 2]
        self._muon = Muon(matrices, config.weight_decay) if config.name == "muon" else None
        # weight decay pulls matrices towards 0; a norm's neutral weight is 1, so vectors have none
        groups = [{"params": vectors, "weight_decay": 0.0}]
        if self._muon is None:
            groups.append({"params": matrices, "weight_decay": config.weight_decay})
        self._adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=_EPS, fused=True)
        self.one_pass = self._muon is None and next(iter(self._names)).is_cuda

    def step(self, factor: float) -> None:
        """One update at `factor` of the peak rates."""
        for group in self._adamw.param_groups:
            group["lr"] = self.config.lr * factor
        self._adamw.step()
        if self._muon is not None:
            self._muon.step(self.config.muon_lr * factor)
        if self._copies:
            torch._foreach_copy_(list(self._copies.values()), [parameter.detach() for parameter in self._copies])

    @torch.no_grad()
    def step_in_one_pass(self, gradients: Sequence[Tensor], scale: float, norm: Tensor, factor: float, updates: int) -> None:
        """Update number `updates` (1, 2, ...) at `factor` of the peak rate from `scale` x gradients, in the order of the parameters.

        They are clipped by `norm`, float32 [] on the device, the norm of the scaled gradients. Where that is not finite nothing changes,
        the counted steps included; so the update is queued without waiting for it."""
        from dflash_ray.draft.kernels.adamw import adamw

        decays = {parameter: group["weight_decay"] for group in self._adamw.param_groups for parameter in group["params"]}
        counted = torch.isfinite(norm).float()
        for parameter, gradient in zip(self._names, gradients, strict=True):
            state = self._adamw.state[parameter]
            if not state:
                state |= {
                    "step": torch.zeros((), device=norm.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
            adamw(
                parameter.detach(), gradient, state["exp_avg"], state["exp_avg_sq"], self._copies.get(parameter), norm,
                scale=scale, clip=self.config.clip, lr=self.config.lr * factor, decay=decays[parameter],
                betas=self.config.betas, eps=_EPS, step=updates,
            )  # fmt: skip
        torch._foreach_add_([self._adamw.state[parameter]["step"] for parameter in self._names], counted)

    def state(self) -> dict[str, Tensor]:
        """The live tensors: `exp_avg.NAME`, `exp_avg_sq.NAME`, `step.NAME`, `momentum.NAME`; none before the first step."""
        state = {f"{kind}.{self._names[p]}": tensor for p, kinds in self._adamw.state.items() for kind, tensor in kinds.items()}
        momenta = self._muon.momenta if self._muon is not None else {}
        return state | {f"momentum.{self._names[p]}": tensor for p, tensor in momenta.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Takes over what `state` gave, copied to each parameter's device."""
        by_name = {name: parameter for parameter, name in self._names.items()}
        self._adamw.state.clear()
        if self._muon is not None:
            self._muon.momenta.clear()
        for key, tensor in state.items():
            kind, name = key.split(".", 1)
            parameter = by_name[name]
            value = tensor.detach().to(parameter.device, torch.float32, copy=True)
            if kind == "momentum":
                assert self._muon is not None, "momenta belong to optimizer.name muon"
                self._muon.momenta[parameter] = value
            else:
                self._adamw.state[parameter][kind] = value


class Muon:
    """Momentum, orthogonalised: the update of a matrix is its momentum with all singular values set to about 1.

    Rates follow Keller Jordan's convention, scaled by sqrt(max(1, rows / columns)). As many matrices of one shape as
    memory allows are orthogonalised together.
    """

    def __init__(self, matrices: list[nn.Parameter], weight_decay: float):
        self.weight_decay = weight_decay
        self.momenta: dict[nn.Parameter, Tensor] = {}
        self._by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for matrix in matrices:
            self._by_shape.setdefault(matrix.shape, []).append(matrix)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for shape, alike in self._by_shape.items():
            together = max(1, _TOGETHER // shape.numel())
            for first in range(0, len(alike), together):
                matrices = alike[first : first + together]
                updates = orthogonalise(torch.stack([self._nesterov(matrix) for matrix in matrices]))
                for matrix, update in zip(matrices, updates, strict=True):
                    matrix.mul_(1 - lr * self.weight_decay)
                    matrix.add_(update, alpha=-lr * max(1.0, shape[0] / shape[1]) ** 0.5)

    def _nesterov(self, matrix: nn.Parameter) -> Tensor:
        if matrix not in self.momenta:
            self.momenta[matrix] = torch.zeros_like(matrix)
        momentum = self.momenta[matrix].lerp_(matrix.grad, 1 - MUON_MOMENTUM)
        return matrix.grad.lerp(momentum, MUON_MOMENTUM)


def orthogonalise(matrices: Tensor) -> Tensor:
    """[n, r, c] -> float32 [n, r, c] with singular values near 1; bf16 matmuls on a GPU, float32 on a CPU."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    x = x.to(torch.bfloat16 if x.is_cuda else x.dtype)
    a, b, c = _QUINTIC
    for _ in range(_ROUNDS):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(gram, gram, gram, beta=b, alpha=c) @ x
    return (x.mT if tall else x).float()
