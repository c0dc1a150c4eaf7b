"""Four hundred hostile requests, other ones with every change of the API's document; hours of them are run by hand."""

from tests.fuzz import attack

CASES = 400


async def test_no_request_of_a_tenant_brings_the_gateway_down():
    report = await attack.run(seed=1, numbers=range(CASES))
    assert report.failures == []
    assert sum(report.outcomes.values()) == CASES
    reached = {
        "http 200",
        "http 400",
        "http 401",
        "http 403",
        "http 404",
        "grpc OK",
        "grpc INVALID_ARGUMENT",
        "hung up",
    }
    assert reached <= set(report.outcomes)
    assert report.neighbour.ttft
