"""Families of kernels: what plugs into the core. See `interface` for the values, `kernels` for the usual way."""

from fa4build.families.interface import Buffer, Family, Input, OpRecipe, Scalar, Step
from fa4build.families.kernels import TORCH_WORKER, FamilyKernel, Pinned, kernel_family, one_step
from fa4build.families.proof import Problem, ProofCase

__all__ = [
    "TORCH_WORKER",
    "Buffer",
    "Family",
    "FamilyKernel",
    "Input",
    "OpRecipe",
    "Pinned",
    "Problem",
    "ProofCase",
    "Scalar",
    "Step",
    "kernel_family",
    "one_step",
]
