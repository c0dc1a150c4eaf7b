"""What `benchmarks.hostile` makes of its figures."""

from benchmarks.hostile import Phase, slowed


def phase(name, *seconds):
    return Phase(name, list(seconds))


def test_an_attack_that_doubles_the_neighbours_p99_is_named():
    alone = phase("alone", *[0.1] * 200)
    fair, unfair = phase("a flood", *[0.2] * 200), phase("a hang", *[0.1] * 190, *[0.21] * 10)
    assert slowed([alone, fair]) == []
    [sentence] = slowed([alone, fair, unfair])
    assert "beside a hang" in sentence and "210 ms, alone 100 ms" in sentence
