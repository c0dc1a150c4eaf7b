"""What `loralane plan` may choose from, as its options say it: devices, forms of weights, prices, splits and links."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gateway.routing.split import SplitMode
from lab.commands.simulate_cluster import SPLITS
from lab.devices.accelerators import ACCELERATORS, FORMS
from lab.devices.device import DeviceSpec, find_device
from lab.devices.links import LINKS, Link
from lab.plans.planning import Candidate, Wish, candidates, ordered
from lab.plans.split import split_candidates

DEVICE, FORM = "h100", "bf16"
"""Device and form of weights that are planned for unless --device or --weights name others."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What the options of `loralane plan` allow for candidates, the engines that a plan may consist of."""

    accelerators: list[str]
    forms: list[str]
    """`accelerators` and `forms`: names of devices by data sheets, and of forms of weights on them."""
    measured: list[DeviceSpec]
    """Devices on which the model was measured."""
    prices: Mapping[str, float]
    """Price of a device an hour, by its name."""
    split: SplitMode
    """Which requests are split between prefill and decode engines, with KV moved over `link`."""
    link: Link

    @classmethod
    def parse(
        cls,
        devices: Sequence[str] | None,
        weights: Sequence[str] | None,
        prices: Sequence[str] | None,
        split: str,
        link: str,
    ) -> Choices:
        """Return the choices that the options' values name. Raises ValueError, which names the option, for an unknown
        name, a file that is no device or a price that is none."""
        names = [name for name in devices or [DEVICE] if not _is_file(name)]
        [mode], [over] = _known([split], SPLITS, "--split"), _known([link], LINKS, "--link")
        measured = [find_device(name) for name in devices or () if _is_file(name)]
        priced = dict(map(_price, prices or ()))
        _known([*priced], [*ACCELERATORS, *(device.name for device in measured)], "--price")
        return cls(
            _known(names, ACCELERATORS, "--device"),
            _known(weights or [FORM], FORMS, "--weights"),
            measured,
            priced,
            SplitMode(mode),
            LINKS[over],
        )

    def candidates(self, wish: Wish) -> list[Candidate]:
        """Return the candidates that serve the traffic of `wish` within its goals, the cheapest first. They are
        computed and not simulated. Raises ValueError if there are none, or if weights that are quantised already would
        have to be quantised again."""
        if wish.shape.is_quantised and self.forms != [FORM]:
            raise ValueError(
                f"--weights: those of {wish.shape.name} are quantised already, and the engine keeps them so: leave it "
                "out, or name the original model"
            )
        whole_engines = candidates(wish, self.accelerators, self.forms, self.prices, self.measured)
        if not whole_engines:
            raise ValueError("no device is large and fast enough: widen the goals, or name other devices or weights")
        if self.split is SplitMode.NEVER:
            return whole_engines
        return ordered([*whole_engines, *split_candidates(whole_engines, wish, self.link)])


def check_devices(devices: Sequence[str] | None, weights: Sequence[str] | None) -> None:
    """Check devices before any is measured. Raises ValueError for a name that is neither known nor that of a file, or
    if forms of weights are named for measured devices alone, which have the weights that they were measured with."""
    _known([name for name in devices or () if not _is_file(name)], [*ACCELERATORS, "a file *.json"], "--device")
    if weights and devices and all(map(_is_file, devices)):
        raise ValueError(
            f"--weights: {devices[-1]} is a device that was measured with the weights it had: leave it out, or add a "
            "device by its name"
        )


def _is_file(device: str) -> bool:
    """Return whether a value of --device is a file of --measure."""
    return device.endswith(".json")


def _known(names: Sequence[str], known: Collection[str], option: str) -> list[str]:
    for name in names:
        if name not in known:
            raise ValueError(f"{option}: {name!r} is none of {', '.join(known)}")
    return list(dict.fromkeys(names))


def _price(text: str) -> tuple[str, float]:
    name, _, amount = text.partition("=")
    try:
        value = float(amount)
    except ValueError:
        value = -1.0
    if not name or not 0 <= value < float("inf"):
        raise ValueError(f"--price must be DEVICE=AMOUNT, such as h100=2.5, not {text!r}")
    return name, value
