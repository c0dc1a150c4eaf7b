"""Compiles the Triton kernels for a GPU that need not be there, and judges what each one uses. As a script, it compiles
some configurations of each kernel (`some_of`) for the compute capability that is its argument.

Prints one JSON object: kernel -> {"REG": ..., "STACK": ..., "LOCAL": ..., "SHARED": ..., "DOT": [...]}.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import compile_attention
import compile_experts
import compile_lora
import compile_quantized
import compile_step
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lora_kernels.gpu.triton_dora import BLOCK, scale_kernel
from lora_kernels.layout import ALIGN

Case = tuple[str, Any, dict[str, Any], dict[str, int]]
"""Name, kernel, constants, launch options."""

POINTERS = {
    "x_ptr": "bf16",
    "out_ptr": "bf16",
    "arena_ptr": "bf16",
    "query_ptr": "bf16",
    "kv_ptr": "bf16",
    "key_ptr": "bf16",
    "value_ptr": "bf16",
    "workspace_ptr": "fp32",
    "sums_ptr": "fp32",
    "factors_ptr": "fp32",
    "totals_ptr": "fp32",
    "stats_ptr": "fp32",
    "scales_ptr": "fp32",
    "sinks_ptr": "fp32",
    "slots_ptr": "i64",
    **compile_step.POINTERS,
    **compile_quantized.POINTERS,
    **compile_experts.POINTERS,
}
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Shared memory a program may have (CUDA programming guide, technical specifications by compute capability)."""
PARKED_BYTES = 8
"""Stack that a kernel may have: some assemblers park one value there to fit another program on the processor."""
FULL_POINTERS = dict.fromkeys(("out_ptr", "query_ptr", "kv_ptr"), "fp32")
"""Holds the types that differ where attention is in fp32."""


def cases(capability: int) -> Iterator[Case]:
    yield from compile_lora.cases(capability)
    for name, (group, _, outs) in compile_lora.GROUPS.items():
        shape = {"LAYERS": 32, "TARGETS": 7, "GROUP": group, "OUT_FEATURES": outs}
        yield (
            f"scale {name}",
            scale_kernel,
            {**shape, "BLOCK": BLOCK, "ALIGN": ALIGN},
            {"num_warps": 4, "num_stages": 1},
        )
    yield from compile_attention.cases(capability)
    yield from compile_step.cases(capability)
    yield from compile_quantized.cases(capability)
    yield from compile_experts.cases(capability)


def compile_for(
    kernel: Any, constants: dict[str, Any], options: dict[str, int], capability: int, *, full: bool = False
) -> Any:
    """The kernel compiled for sm_`capability`, with pointers and strides aligned as they are in life.

    Args:
        full: attention in fp32.
    """
    signature, attrs = {}, {}
    pointers = (
        POINTERS
        | {"codes_ptr": "i8" if constants.get("ROUNDS") else "fp8e4nv"}
        | ({"kv_ptr": "fp8e4nv"} if constants.get("FP8") else {})
        | (FULL_POINTERS if full else {})
    )
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            is_fp8 = name == "arena_ptr" and constants.get("FP8")
            signature[name] = "*" + ("i8" if is_fp8 else pointers.get(name, "i32"))
            attrs[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
            if name.endswith("_stride"):
                attrs[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def usage(kernel: Any) -> dict[str, Any]:
    """Registers, stack and static memory as `cuobjdump` sees them, and the dynamic shared memory of a launch."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        report = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", report.stdout)}
    return {**found, "SHARED": kernel.metadata.shared, "DOT": dots(kernel)}


def dots(kernel: Any) -> list[str]:
    """How it multiplies matrices: instructions, and how many neighbours of the inner dimension a thread feeds them."""
    instructions = re.findall(r"(?:wgmma\.mma_async|mma\.sync)[\w.]+", kernel.asm["ptx"])
    return sorted({*instructions, *re.findall(r"kWidth = \d+", kernel.asm["ttgir"])})


def compile_and_measure(case: Case, capability: int) -> dict[str, Any]:
    name, kernel, constants, options = case
    return usage(compile_for(kernel, constants, options, capability, full=name.endswith("fp32")))


def complaint(name: str, used: dict[str, Any], capability: int) -> str:
    """Returns what a kernel takes too much of, or an empty string."""
    spills = (used["STACK"] > PARKED_BYTES or used["LOCAL"] > 0) and not name.endswith("fp32")
    if used["SHARED"] > SHARED_BYTES[capability]:
        return f"{used['SHARED']} bytes of shared memory, of {SHARED_BYTES[capability]}"
    return f"spills {used['STACK'] + used['LOCAL']} bytes" if spills else ""


def complaints(found: Mapping[str, dict[str, Any]], capability: int) -> list[str]:
    """Returns a line for each kernel in `found` that takes too much or multiplies in another way than it should."""
    bad = [f"{name}: {what}" for name, used in found.items() if (what := complaint(name, used, capability))]
    bad += [
        f"{name}: is multiplied by {used['DOT']}" for name, used in found.items() if not has_one_product(name, used)
    ]
    for name, programs in compile_attention.programs_side_by_side(capability).items():
        if name in found and not fit_side_by_side(found[name], programs, capability):
            bad.append(f"{name}: {programs} programs do not fit on a multiprocessor")
    return bad


def has_one_product(name: str, used: dict[str, Any]) -> bool:
    """Returns whether a LoRA kernel multiplies by the one instruction that all of them use, so that a row has the same
    bits in a tile of any height. Hopper has another (wgmma), for tall tiles. A thread feeds it four neighbours at once
    if it gets them from 8-bit weights as they are loaded. Other kernels may use any."""
    if not name.startswith(("shrink", "expand")):
        return True
    instruction = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    neighbours = 4 if name.startswith("shrink") and name.endswith("fp8") else 2
    return bool(used["DOT"] == [f"kWidth = {neighbours}", instruction])


def fit_side_by_side(used: dict[str, Any], programs: int, capability: int) -> bool:
    """Returns whether the programs of a decode kernel that are launched run at once: one that had to wait would double
    the time. There must be two of them at least."""
    registers = -(-used["REG"] // 8) * 8 * 128
    shared = used["SHARED"] + 1024
    room = compile_attention.PROCESSORS[capability].shared_bytes
    return programs >= 2 and programs * registers <= 65536 and programs * shared <= room


def some_of(found: Iterable[Case]) -> Iterator[Case]:
    """The last case of each kernel, in 16 bits and in FP8, for short and for long segments: for attention, the ones
    with the widest heads; for pointwise kernels and sampling, the widest rows."""
    kept = (case for case in found if not case[0].endswith("fp32"))
    return iter({(case[1].__name__, case[0].endswith("fp8"), " long" in case[0]): case for case in kept}.values())


if __name__ == "__main__":
    capability = int(sys.argv[1])
    print(json.dumps({case[0]: compile_and_measure(case, capability) for case in some_of(cases(capability))}))
