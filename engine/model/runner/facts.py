"""What a rank serves, and in which form: known from the configuration, the device and the files, before any weight is
loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.model.memory.allocation import pick_device, pick_dtype
from engine.model.memory.arena import PageShape, page_shape
from engine.model.ranks.collectives import Ranks
from engine.model.ranks.shard import Shard
from engine.model.ranks.stages import find_shard
from engine.model.runner.identity import hash_model, kv_identity
from engine.model.runner.sizes import (
    Sized,
    agreed,
    count_page_bytes,
    fill_sizes,
    find_kept_bits,
    has_fp8_kv,
    max_model_len,
    read_served_spec,
    stores_fp8,
    warn_of_dequantised,
)
from engine.model.spec.config import ModelSpec
from engine.model.weights.reader import name_weights
from lora_kernels.pinned import upload_ring


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model that an engine serves, and about the form in which this rank serves it."""

    config: EngineConfig
    """The rank's configuration, with the sizes that it left to the engine."""
    spec: ModelSpec
    """The shape of the whole model."""
    device: torch.device
    dtype: torch.dtype
    shard: Shard
    """The part of the model that this rank has."""
    page: PageShape
    """The shape of this rank's pages."""
    page_bytes: int
    """Bytes of a page. With several stages, they are those of the stage that has most layers."""
    max_model_len: int
    """Maximum number of tokens of one sequence."""
    fp8_adapters: bool
    """True means that adapters are stored in FP8."""
    weights: str
    """Name of the format of the weights (see `name_weights`)."""
    model_hash: str
    """Hash that is stable across restarts, and differs for different weights (see `hash_model`)."""
    kv_identity: str
    """Hash that engines share whose KV pages are interchangeable (see `kv_identity`)."""

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.spec.eos_token_ids

    @property
    def overlaps(self) -> bool:
        """Return whether a step is planned while the step before is computed: on a GPU, unless configured otherwise."""
        return self.config.overlap and self.device.type == "cuda"

    @property
    def proposes(self) -> bool:
        """Return whether plans may have proposals (speculated tokens): on a CPU only, because a GPU plans a step before
        it knows the tokens to append them to."""
        return self.device.type == "cpu"

    @property
    def speculates(self) -> bool:
        return self.proposes and self.config.speculation != "off"


def find_facts(config: EngineConfig, ranks: Ranks) -> tuple[ModelFacts, Sized]:
    """Return the facts of the model that a rank's configuration names, and the sizes that the ranks have agreed on,
    which are logged. Raises ValueError if the folder or the configuration cannot be served on this device."""
    spec, device = read_served_spec(config), pick_device(config.device)
    upload_ring(device)  # allocated here, because a GPU may stop when memory is pinned
    dtype = pick_dtype(config.dtype, device)
    fp8_adapters = stores_fp8(config.adapter_dtype, device, dtype)
    shard = find_shard(config, spec, find_kept_bits(config, spec, device, dtype), ranks.number)
    sized = agreed(fill_sizes(config, spec, device, dtype, shard), ranks)
    sized.tell()
    config, longest = sized.config, max_model_len(sized.config, spec)
    weights = name_weights(Path(config.model), spec, config.load_format, config.weights, dtype)
    warn_of_dequantised(weights, sized.weight_bytes, dtype)
    page = page_shape(shard.spec(spec), config.block_size, has_fp8_kv(config, dtype, device))
    model_hash = hash_model(config)
    facts = ModelFacts(
        config=config,
        spec=spec,
        device=device,
        dtype=dtype,
        shard=shard,
        page=page,
        page_bytes=count_page_bytes(config, spec, device, dtype, shard),
        max_model_len=longest,
        fp8_adapters=fp8_adapters,
        weights=weights,
        model_hash=model_hash,
        kv_identity=kv_identity(model_hash, str(dtype), page, longest, fp8_adapters=fp8_adapters),
    )
    return facts, sized
