"""Compiles the Triton kernels for a GPU that need not be there, and prints what each one uses. Run as a script.

Prints one JSON object: kernel -> {"REG": ..., "STACK": ..., "LOCAL": ..., "SHARED": ...}.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compile_step
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lora_kernels.layout import ALIGN, MAX_TILES, RANK_TILE
from lora_kernels.triton_attention import DECODE_HEIGHT, PREFILL_HEIGHT, attention_kernel, tuning, write_kernel
from lora_kernels.triton_dora import BLOCK, scale_kernel
from lora_kernels.triton_lora import BLOCK_K, BLOCK_N, ROW_TILE, expand_kernel, num_splits, shrink_kernel

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
    "slots_ptr": "i64",
    **compile_step.POINTERS,
}
LORA = {"LAYERS": 32, "TARGETS": 7, "BLOCK_M": ROW_TILE, "BLOCK_R": RANK_TILE, "MAX_TILES": MAX_TILES, "ALIGN": ALIGN}
GROUPS = {
    "qkv": ((0, 1, 2), 4096, (4096, 1024, 1024)),
    "down": ((6,), 1536, (576,)),
}


def cases() -> Iterator[Case]:
    for name, (group, width, outs) in GROUPS.items():
        common = {**LORA, "GROUP": group, "SPLITS": num_splits(width)}
        constants = {**common, "IN_FEATURES": width, "BLOCK_K": BLOCK_K}
        yield f"shrink {name}", shrink_kernel, constants, {"num_warps": 4, "num_stages": 3}
        constants = {**common, "OUT_FEATURES": outs, "BLOCK_N": BLOCK_N}
        yield f"expand {name}", expand_kernel, constants, {"num_warps": 4, "num_stages": 2}
        shape = {"LAYERS": 32, "TARGETS": 7, "GROUP": group, "OUT_FEATURES": outs}
        yield (
            f"scale {name}",
            scale_kernel,
            {**shape, "BLOCK": BLOCK, "ALIGN": ALIGN},
            {"num_warps": 4, "num_stages": 1},
        )
    for head_dim, decode, window in itertools.product((64, 128, 256), (True, False), (True, False)):
        if head_dim == 128 or not window:
            yield attention_case(head_dim, decode, window)
    yield "write", write_kernel, {"BLOCK_SIZE": 16, "WIDTH": 1024, "BLOCK": 1024}, {"num_warps": 4, "num_stages": 1}
    yield from compile_step.cases()


def attention_case(head_dim: int, decode: bool, window: bool) -> Case:
    height = DECODE_HEIGHT if decode else PREFILL_HEIGHT
    options = tuning(head_dim, height)
    launch = {key: options.pop(key) for key in ("num_warps", "num_stages")}
    constants = {
        **options,
        "DECODE": decode,
        "HAS_WINDOW": window,
        "GROUP": 4,
        "KV_HEADS": 8,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": 16,
        "BLOCK_M": height,
    }
    name = f"{'decode' if decode else 'prefill'} {head_dim}{' window' if window else ''}"
    return name, attention_kernel, constants, launch


def compile_for(kernel: Any, constants: dict[str, Any], options: dict[str, int], capability: int) -> Any:
    """The kernel compiled for sm_`capability`, with pointers and strides aligned as they are in life."""
    signature, attrs = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = "*" + POINTERS.get(name, "i32")
            attrs[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
            if name.endswith("_stride"):
                attrs[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def usage(kernel: Any) -> dict[str, int]:
    """Registers, stack and static memory as `cuobjdump` sees them, and the dynamic shared memory of a launch."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        report = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", report.stdout)}
    return {**found, "SHARED": kernel.metadata.shared}


if __name__ == "__main__":
    capability = int(sys.argv[1])
    found = {
        name: usage(compile_for(kernel, constants, options, capability)) for name, kernel, constants, options in cases()
    }
    print(json.dumps(found))
