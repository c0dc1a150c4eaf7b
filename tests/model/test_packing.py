"""Packing by recipe is packing tensor by tensor, bit for bit."""

import json
import time
from threading import Event

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from tiny_adapters import save_adapter

from engine.model.adapters.packing import Packer, load_ahead
from engine.model.adapters.peft.loader import load_peft
from engine.model.adapters.peft.settings import AdapterError
from engine.model.adapters.peft.targets import TargetShapes
from engine.model.adapters.recipes import MOST_KNOWN, Recipes
from engine.model.layers.lora import TARGETS
from engine.model.memory.host import PagedMemory
from lora_kernels.layout import LoraTable, ProjectionGroup, pack_adapter, plan_layout
from lora_kernels.reference import lora_delta

WIDTHS = np.array([(64, 64), (64, 32), (64, 32), (64, 64), (64, 96), (64, 96), (96, 64)], dtype=np.int32)
SHAPES = TargetShapes(2, TARGETS, WIDTHS, lambda module: None)
PAGE = 2048


def change(folder, dtype=None, **settings):
    if dtype is not None:
        file = folder / "adapter_model.safetensors"
        save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def host_memory(dtype):
    return PagedMemory(torch.zeros(64, PAGE, dtype=dtype))


def packer(dtype=torch.bfloat16):
    pytest.importorskip("numba")
    return Packer(SHAPES, PAGE, dtype, host_memory(dtype), loaded_kernels(dtype))


def loaded_kernels(dtype):
    kernels = load_ahead(dtype, fp8=False)
    if kernels is not None:
        assert kernels.wait(120)
    return kernels


def one_by_one(folder, dtype):
    loaded = load_peft(folder, SHAPES)
    layout = plan_layout(loaded.ranks, WIDTHS, PAGE)
    return layout, pack_adapter(layout, loaded.blocks, PAGE, dtype)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rank", "settings"), [(1, {}), (7, {"lora_alpha": 11}), (40, {"use_rslora": True})])
def test_by_recipe_is_tensor_by_tensor(tmp_path, stored, dtype, rank, settings):
    save_adapter(tmp_path / "x", rank, seed=rank)
    change(tmp_path / "x", stored, **settings)
    ours = packer(dtype)
    packed = ours.pack(ours.read(str(tmp_path / "x")))
    layout, blob = one_by_one(tmp_path / "x", dtype)
    assert torch.equal(packed.blob.contents().view(torch.uint8), blob.view(torch.uint8))
    assert np.array_equal(packed.layout.offsets, layout.offsets)


def test_until_the_kernels_are_loaded_adapters_are_packed_tensor_by_tensor(tmp_path):
    save_adapter(tmp_path / "x", 7, seed=0)
    ours = Packer(SHAPES, PAGE, torch.bfloat16, host_memory(torch.bfloat16), Event())
    folder = ours.read(str(tmp_path / "x"))
    assert ours.check(folder) == packer().check(folder)
    assert torch.equal(ours.pack(folder).blob.contents(), packer().pack(folder).blob.contents())


def test_an_engine_whose_packing_kernels_cannot_be_loaded_says_so(monkeypatch):
    def fail(dtype):
        raise RuntimeError("no memory to compile")

    monkeypatch.setattr("engine.model.adapters.packing.load_kernels", fail)
    with capture_logs() as logs:
        kernels = load_ahead(torch.float32, fp8=False)
        while not logs:
            time.sleep(0.01)
    assert [entry["event"] for entry in logs] == ["packing_kernels_not_loaded"]
    assert not kernels.is_set()


def test_adapters_of_one_structure_share_a_recipe(tmp_path):
    recipes, ours = Recipes(SHAPES, PAGE), packer()
    for number, rank in enumerate((3, 3, 4)):
        save_adapter(tmp_path / str(number), rank, seed=number)
    first, second, third = (recipes.find(ours.read(str(tmp_path / str(number)))) for number in range(3))
    assert first is second and first is not third
    change(tmp_path / "1", lora_alpha=1)
    assert recipes.find(ours.read(str(tmp_path / "1"))) is not first, "another scale"


def test_host_memory_is_reserved_for_an_adapter_and_its_layout(tmp_path):
    save_adapter(tmp_path / "x", 3, seed=0)
    ours = packer()
    folder = ours.read(str(tmp_path / "x"))
    packed, sizes = ours.pack(folder), {one.check(folder).num_bytes for one in (ours, packer())}
    layout = packed.layout
    assert sizes == {packed.blob.nbytes + layout.ranks.nbytes + layout.offsets.nbytes + layout.scales.nbytes}
    assert sizes == {packed.num_bytes}


def test_a_tile_larger_than_a_page_is_refused_with_advice(tmp_path):
    save_adapter(tmp_path / "x", 16, seed=0)
    ours = Packer(SHAPES, 512, torch.bfloat16, host_memory(torch.bfloat16), None)
    with pytest.raises(AdapterError, match=r"512: raise engine.block_size, with which pages grow, or lower the rank"):
        ours.check(ours.read(str(tmp_path / "x")))


def test_few_structures_are_remembered(tmp_path, monkeypatch):
    recipes, ours = Recipes(SHAPES, PAGE), packer()
    save_adapter(tmp_path / "x", 3, seed=0)
    for alpha in range(1, MOST_KNOWN + 10):
        change(tmp_path / "x", lora_alpha=alpha)
        recipes.find(ours.read(str(tmp_path / "x")))
    assert len(recipes._known) == MOST_KNOWN
    for most, kept in ((recipes._num_bytes() // 2, MOST_KNOWN // 2), (1, 1)):
        monkeypatch.setattr("engine.model.adapters.recipes.MOST_BYTES", most)
        change(tmp_path / "x", lora_alpha=1000 + kept)
        folder = ours.read(str(tmp_path / "x"))
        assert recipes.find(folder) is recipes.known(folder) is not None
        assert len(recipes._known) in (kept, kept - 1)


def test_types_that_packing_does_not_know_have_no_recipe(tmp_path):
    save_adapter(tmp_path / "x", 3, seed=0)
    change(tmp_path / "x", torch.float64)
    ours = packer()
    folder = ours.read(str(tmp_path / "x"))
    assert Recipes(SHAPES, PAGE).find(folder) is None
    assert torch.equal(ours.pack(folder).blob.contents(), one_by_one(tmp_path / "x", torch.bfloat16)[1])


def test_a_mixture_of_types_has_no_recipe(tmp_path):
    save_adapter(tmp_path / "x", 3, seed=0)
    file = tmp_path / "x" / "adapter_model.safetensors"
    tensors = load_file(file)
    first = next(iter(tensors))
    save_file(tensors | {first: tensors[first].bfloat16()}, file)
    assert Recipes(SHAPES, PAGE).find(packer().read(str(tmp_path / "x"))) is None


def overwrite(folder, value):
    """One number of the last tensor of the file, whose header stays as it is."""
    file = folder / "adapter_model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-4] + np.float32(value).tobytes())


def known_structure(tmp_path):
    """A packer that has met a structure, and another adapter of it."""
    ours = packer()
    for number in range(2):
        save_adapter(tmp_path / str(number), 3, seed=number)
    ours.pack(ours.read(str(tmp_path / "0")))
    return ours, tmp_path / "1"


def test_what_says_dora_and_has_no_magnitudes_is_refused_beside_a_known_structure_too(tmp_path):
    ours, folder = known_structure(tmp_path)
    ours.check(ours.read(str(folder)))
    change(folder, use_dora=True)
    with pytest.raises(AdapterError, match="magnitude"):
        ours.check(ours.read(str(folder)))


def test_a_known_structure_is_told_as_an_unknown_one(tmp_path, monkeypatch):
    ours, folder = known_structure(tmp_path)
    told = packer().check(ours.read(str(folder)))
    monkeypatch.setattr("engine.model.adapters.packing.check_peft", None)
    assert ours.check(ours.read(str(folder))) == told


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_numbers_of_a_known_structure_are_checked(tmp_path, value):
    """3e38 is finite, and no longer times the scale of 2."""
    ours, folder = known_structure(tmp_path)
    overwrite(folder, value)
    with pytest.raises(AdapterError, match="NaN or infinite"):
        ours.check(ours.read(str(folder)))


@pytest.mark.parametrize("end", [-1, -4, -2000])
def test_a_known_structure_cut_short_is_refused(tmp_path, end):
    ours, folder = known_structure(tmp_path)
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:end])
    with pytest.raises(AdapterError, match="damaged or cut short"):
        ours.check(ours.read(str(folder)))


def test_in_fp8_an_adapter_takes_half_the_pages(tmp_path):
    """And multiplies as it did, but for what e4m3's four bits cost."""
    save_adapter(tmp_path / "x", 20, seed=0)
    ours, plain = (
        Packer(SHAPES, PAGE, torch.bfloat16, host_memory(torch.bfloat16), None, fp8=True),
        packer(),
    )
    folder = ours.read(str(tmp_path / "x"))
    packed, host = ours.pack(folder), ours.check(folder)
    assert packed.layout.fp8 and host.num_pages == len(packed.blob.pages)
    assert host.num_bytes == packed.num_bytes and packed.blob.nbytes < 0.6 * plain.pack(folder).blob.nbytes
    loaded, table = load_peft(tmp_path / "x", SHAPES), LoraTable(1, 2, 7, PAGE, torch.device("cpu"), fp8=True)
    table.set(0, packed.layout, tuple(range(host.num_pages)))
    (layer, target), (a, b) = next(iter(loaded.blocks.items()))
    group = ProjectionGroup("one", (target,), a.shape[1], (len(b),))
    delta = lora_delta(torch.eye(a.shape[1]), [0] * a.shape[1], packed.blob.contents().view(-1), table, layer, group)
    error = (delta - (b @ a).T.float()).norm() / (b @ a).norm()
    assert 0 < error < 0.05


def test_what_cannot_be_packed_leaves_no_page_behind(tmp_path, monkeypatch):
    ours, folder = known_structure(tmp_path)
    before = len(ours._memory._free)
    monkeypatch.setattr("lora_kernels.cpu.numba_pack.pack_tiles", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ours.pack(ours.read(str(folder)))
    assert len(ours._memory._free) == before


@pytest.mark.parametrize("stored", [torch.float32, torch.float64])
def test_pages_that_held_another_adapter_are_as_good_as_new(tmp_path, stored):
    """By recipe and, of a type that has none, tensor by tensor; into pages that lie apart and are full of NaN."""
    memory = host_memory(torch.bfloat16)
    ours = Packer(SHAPES, PAGE, torch.bfloat16, memory, loaded_kernels(torch.bfloat16))
    save_adapter(tmp_path / "x", 7, seed=0)
    change(tmp_path / "x", stored)
    held = [memory.take(1) for _ in range(64)]
    for blob in held:
        blob.fill(torch.full((1, PAGE), torch.nan, dtype=torch.bfloat16))
    for blob in held[::2]:
        memory.give(blob)
    packed = ours.pack(ours.read(str(tmp_path / "x")))
    assert torch.equal(packed.blob.contents(), one_by_one(tmp_path / "x", torch.bfloat16)[1])
    assert all(blob.contents().isnan().all() for blob in held[1::2]), "pages of others stay as they are"
