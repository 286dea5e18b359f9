"""Muon for the layers' matrices (Jordan et al. 2024), AdamW for everything else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)
_MOMENTUM = 0.95


def orthogonalised(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices of a stack [N, R, C], about: five Newton-Schulz steps."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Optimiser:
    """Both optimisers behind one ``step``. Matrices of one shape are handled as one stack."""

    def __init__(
        self,
        matrices: list[Tensor],
        others: list[Tensor],
        matrix_rate: float,
        other_rate: float,
        decay: float = 0.05,
    ) -> None:
        self.stacks: dict[tuple[int, ...], list[Tensor]] = {}
        for matrix in matrices:
            self.stacks.setdefault(tuple(matrix.shape), []).append(matrix)
        self.momenta = {shape: torch.zeros(len(stack), *shape) for shape, stack in self.stacks.items()}
        self.adam = torch.optim.AdamW(others, lr=other_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.parameters = [*matrices, *others]
        self.matrix_rate, self.other_rate, self.decay = matrix_rate, other_rate, decay

    def step(self, scale: float) -> None:
        """Change the parameters by their gradients, at ``scale`` times the full rates; clear those."""
        for group in self.adam.param_groups:
            group["lr"] = self.other_rate * scale
        self.adam.step()
        rate = self.matrix_rate * scale
        with torch.no_grad():
            for shape, stack in self.stacks.items():
                gradient = torch.stack([matrix.grad for matrix in stack])
                momentum = self.momenta[shape].lerp_(gradient, 1 - _MOMENTUM)
                update = orthogonalised(gradient.lerp(momentum, _MOMENTUM))
                size = rate * max(1.0, shape[0] / shape[1]) ** 0.5
                for matrix, change in zip(stack, update, strict=True):
                    matrix.mul_(1 - rate * self.decay).add_(change, alpha=-size)
        for parameter in self.parameters:
            parameter.grad = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"momenta": self.momenta, "adam": self.adam.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """The reverse of ``state``."""
        self.momenta = state["momenta"]
        self.adam.load_state_dict(state["adam"])
