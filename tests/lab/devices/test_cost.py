"""Cost models, the devices that come with the project, and what a plan asks of one."""

import json

import pytest

from engine.core.messages.requests import SamplingParams
from engine.core.messages.step import AdapterLoad, AdapterMoves, Admission, PageCopy, ScheduledChunk, StepPlan
from lab.devices.cost import LiveSequence, StepWork, measure, read_device
from lab.devices.device import FOLDER, device_names, find_device
from lab.sim.timed import TimedExecutor, VirtualClock, VirtualDisk


def grid():
    for decodes, context, prefill in [(1, 100, 0), (8, 4000, 0), (32, 30_000, 0), (0, 0, 30), (4, 2000, 100)]:
        attention = prefill * prefill / 2
        yield StepWork(prefill, decodes, context, attention, decodes, 2, 24, 24 * (prefill + decodes), 2)


@pytest.mark.parametrize("name", device_names())
@pytest.mark.parametrize("term", StepWork._fields)
def test_more_work_takes_no_less_time(name, term):
    cost = find_device(name).cost
    for work in grid():
        for more in (1, 10):
            longer = work._replace(**{term: getattr(work, term) + more})
            if longer.tokens <= 48 or work.tokens > 48:
                assert cost.seconds(longer) >= cost.seconds(work)


@pytest.mark.parametrize("name", device_names())
def test_known_orders_of_magnitude(name):
    device = find_device(name)
    one = device.cost.seconds(StepWork(decode_tokens=1, decode_context=100, samples=1))
    many = device.cost.seconds(StepWork(decode_tokens=32, decode_context=3200, samples=32))
    prompt = device.cost.seconds(StepWork(prefill_tokens=256, prefill_attention=256 * 128, samples=1))
    assert one < many < 32 * one
    assert one < prompt < 256 * one
    assert device.cost.seconds(StepWork(pages_copied=5)) < one


@pytest.mark.parametrize("name", device_names())
def test_every_figure_has_a_source(name):
    document = json.loads((FOLDER / f"{name}.json").read_text())
    sources = document["sources"]
    assert {"noise_sigma", "engine", "page_bytes", "adapter_bytes_per_rank"} <= set(sources)
    assert "cost" in sources or set(document["cost"]) <= set(sources)


def test_h100_reads_its_weights_in_five_milliseconds():
    """15.01 GB at 0.87 of 3.35 TB/s, and 0.8 ms of overhead."""
    step = find_device("h100-8b").cost.seconds(StepWork(decode_tokens=1, decode_context=1, samples=1))
    assert step == pytest.approx(0.00595, rel=0.01)


def test_pages_of_adapters():
    device = find_device("h100-8b")
    assert [device.adapter_pages(rank) for rank in (4, 16, 64)] == [10, 40, 160]


def test_unknown_and_broken_devices_are_named(tmp_path):
    with pytest.raises(ValueError, match="h100-8b"):
        find_device("tpu")
    path = tmp_path / "device.json"
    path.write_text('{"name": "x"}')
    with pytest.raises(ValueError, match="description"):
        read_device(path)
    path.write_bytes(b"\x81{")
    with pytest.raises(ValueError, match="does not describe a device"):
        read_device(path)


def chunk(name, start, count, *, samples=True):
    return ScheduledChunk(name, start, count, (), samples)


def test_work_in_a_plan():
    live = {"a": LiveSequence(0, "x", 8), "b": LiveSequence(0, "x", 8), "c": LiveSequence(0, None, 0)}
    plan = StepPlan(
        saves=(PageCopy(1, 1),),
        adapters=AdapterMoves(loads=(AdapterLoad("y", (4, 5)),)),
        chunks=(chunk("a", 9, 1), chunk("b", 4, 6, samples=False), chunk("c", 19, 1)),
    )
    assert measure(plan, live) == StepWork(6, 2, 30, 6 * 4 + 18, 2, 1, 8, 8 * 7, 3)


def admission(name, seed):
    return Admission(name, (1, 2, 3), 3, 0, (1,), None, SamplingParams(seed=seed))


def execute(executor, plan):
    executor.submit(plan)
    return executor.collect()


def run(noise, seed, device):
    clock, seen = VirtualClock(), []
    disk = VirtualDisk(clock, device.disk_bytes_per_s)
    executor = TimedExecutor(device.cost, clock, disk, {}, lambda *step: seen.append(step), noise, seed)
    first = execute(executor, StepPlan(admitted=(admission("a", 5),), chunks=(chunk("a", 0, 3),)))
    second = execute(executor, StepPlan(chunks=(chunk("a", 3, 1),)))
    chunks = chunk("a", 0, 3), chunk("a", 3, 1)
    again = execute(executor, StepPlan(released=("a",), admitted=(admission("a", 5),), chunks=chunks))
    return clock.now, [token.token for result in (first, second, again) for token in result.sampled], seen


def test_time_passes_as_the_model_says_and_tokens_repeat(device):
    now, tokens, seen = run(0.0, 0, device)
    assert now == pytest.approx(sum(device.cost.seconds(work) for _, work, _ in seen))
    assert tokens[:2] == tokens[2:]
    assert tokens[0] != tokens[1]


def test_noise_is_seeded(device):
    assert run(0.1, 1, device)[0] == run(0.1, 1, device)[0]
    assert run(0.1, 1, device)[0] != run(0.1, 2, device)[0]
