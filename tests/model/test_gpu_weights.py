"""Decoders with quantised weights as a GPU keeps them, and adapters, under Triton's interpreter; needs no GPU."""

import pytest

from tests.model.test_graphs import run_interpreted


@pytest.fixture(scope="module")
def differences(tiny_llama):
    return run_interpreted("gpu_weight_checks.py", tiny_llama)


@pytest.mark.parametrize(("form", "most"), [("int4", 1e-4), ("by_rows", 0.3)])
def test_log_probabilities_are_those_of_the_dequantised_weights(differences, form, most):
    """Activations in 8 bits move them: these random models are sharper than trained ones."""
    *drifts, adapters = differences[form]
    assert max(drifts) < most < adapters / 10
