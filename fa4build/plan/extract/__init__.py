"""Launch plans from compiled host functions.

Read is `compiled.ir_module`, the DSL's public attribute: after `cute.compile(..., options="--enable-tvm-ffi ...")` it
holds the host function and its argument-checking entry as lowered LLVM code. Both are executed symbolically
(`machine`), the launches become templates (`launch`), the entry's checks become guards (`entry`). What is not
understood is an error with its place, never a guess.
"""

from __future__ import annotations

from fa4build.plan.extract.extraction import extract_plan
from fa4build.plan.validate import validate_plan

__all__ = ["extract_plan", "validate_plan"]
