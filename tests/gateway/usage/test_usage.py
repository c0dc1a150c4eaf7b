"""What usage comes to: sums, prices and costs in exact decimals, as JSON and CSV."""

from __future__ import annotations

import csv
from datetime import date
from decimal import Decimal
from fractions import Fraction
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.file import ConfigError
from gateway.config.whole import parse_config
from gateway.core.billing import BillingConfig, Price
from gateway.core.errors import ApiError
from gateway.core.usage import NOTHING, Counts, RowName, UsageRow, today
from gateway.usage import report as reports
from gateway.usage.render import line_fields, money, report_csv, report_json
from gateway.usage.report import DIMENSIONS, UsageQuery, UsageTally, parse_query

JULY, AUGUST = date(2026, 7, 31), date(2026, 8, 1)
counts = st.builds(Counts, *[st.integers(0, 2**53 // 1000)] * 5)
names = st.sampled_from(["pirate", "poet", "base:tiny", 'with "quotes", and commas'])
rows = st.builds(
    UsageRow,
    st.sampled_from(["acme", "globex"]),
    st.sampled_from([JULY, AUGUST]),
    st.builds(RowName, st.sampled_from(["interactive", "batch"]), st.sampled_from(["k1", "k2"]), names),
    counts,
)
prices = st.decimals(0, 1_000_000, places=6)
groups = st.lists(st.sampled_from(DIMENSIONS), unique=True).map(lambda chosen: tuple(sorted(chosen)))


def row(adapter="pirate", lane="batch", day=JULY, **figures) -> UsageRow:
    return UsageRow("acme", day, RowName(lane, "k1", adapter), Counts(**figures))


def tallied(given_rows, billing=BillingConfig(), **query):  # noqa: B008
    tally = UsageTally(UsageQuery(**{"since": JULY, "until": AUGUST} | query), billing)
    tally.add(given_rows)
    return tally.report()


def priced(section: str | list, **more) -> BillingConfig:
    return parse_config({"billing": {"prices": section, **more}}, {}, None).billing


@given(st.lists(rows, max_size=30), groups, prices, prices, prices, prices)
def test_a_report_is_the_exact_sum_of_its_rows(given_rows, group_by, prompt, completion, cached, hour):
    billing = BillingConfig(device_hour=hour, prices=(Price(prompt, completion, cached),))
    report = tallied(given_rows, billing, group_by=group_by)
    exact = (
        sum(
            (
                Fraction(one.counts.prompt_tokens - one.counts.cached_tokens) * Fraction(prompt)
                + one.counts.cached_tokens * Fraction(cached)
                + one.counts.completion_tokens * Fraction(completion)
            )
            for one in given_rows
        )
        / 10**6
    )
    assert Fraction(report.total.amount) == exact == sum(Fraction(line.amount) for line in report.lines)
    assert report.total.counts == sum((one.counts for one in given_rows), NOTHING)
    assert report.total.counts == sum((line.counts for line in report.lines), NOTHING)
    device_hours = Fraction(report.total.counts.device_us, 3_600_000_000)
    if hour:
        assert abs(Fraction(report.total.cost) - device_hours * Fraction(hour)) <= Fraction(1, 10**9)
    assert len({tuple(line.group.values()) for line in report.lines}) == len(report.lines)


@given(st.lists(rows, max_size=20), groups)
def test_csv_says_what_json_says(given_rows, group_by):
    report = tallied(given_rows, BillingConfig(device_hour=Decimal(2), prices=(Price(Decimal("0.1"), Decimal(3)),)))
    read = list(csv.DictReader(StringIO(report_csv(report), newline="")))
    as_json = report_json(report)
    assert [line.pop("currency") for line in read] == [as_json["currency"]] * len(read)
    texts = [{name: "" if value is None else str(value) for name, value in line.items()} for line in as_json["usage"]]
    assert read == texts


def test_floats_would_not_have_done():
    billing = priced([{"prompt": 0.1, "completion": "0.2"}])
    ones = [row(prompt_tokens=1, completion_tokens=1)] * 10
    assert tallied(ones, billing).total.amount == Decimal("0.000003")
    assert sum(1 * 0.1 / 1e6 + 1 * 0.2 / 1e6 for _ in ones) != 0.000003


def test_the_first_price_that_fits_adapter_lane_and_day_counts():
    billing = priced(
        [
            {"adapter": "p*", "lane": "batch", "prompt": 1, "completion": 2, "since": "2026-08-01"},
            {"adapter": "p*", "prompt": 3, "completion": 4, "cached": 0.5},
            {"lane": "batch", "prompt": 5, "completion": 6},
            {"prompt": 7, "completion": 8},
        ]
    )
    figures = {"prompt_tokens": 3_000_000, "cached_tokens": 1_000_000, "completion_tokens": 1_000_000}
    asked = [
        (row(day=AUGUST, **figures), 3 + 2),
        (row(day=JULY, **figures), 6 + Decimal("0.5") + 4),
        (row(lane="interactive", day=AUGUST, **figures), 6 + Decimal("0.5") + 4),
        (row("story", **figures), 15 + 6),
        (row("*", "interactive", **figures), 21 + 8),
    ]
    assert [billing.amount(one) for one, _ in asked] == [amount for _, amount in asked]


def test_what_a_million_tokens_of_a_lane_cost():
    billing = BillingConfig(device_hour=Decimal("3.60"))
    day = [
        row(lane="batch", prompt_tokens=600, completion_tokens=400, device_us=2_000_000),
        row(lane="interactive", prompt_tokens=50, completion_tokens=50, device_us=1_000_000),
        row(lane="interactive", requests=1),
    ]
    report = tallied(day, billing, group_by=("lane",))
    assert [(line.group["lane"], line.cost, line.cost_per_million) for line in report.lines] == [
        ("batch", Decimal("0.002"), Decimal(2)),
        ("interactive", Decimal("0.001"), Decimal(10)),
    ]
    assert report.total.amount is None
    assert tallied([row(requests=1)], billing).total.cost_per_million is None
    assert tallied(day).total.cost is None, "the operator has not said what an hour costs"


@pytest.mark.parametrize(
    ("billing", "words"),
    [
        ({"currency": "dollars"}, "billing: currency must be three capital letters"),
        ({"prices": {"prompt": 1}}, "billing.prices: must be a list"),
        ({"prices": [{"prompt": 1}]}, "billing.prices[0].completion: is required"),
        ({"prices": [{"prompt": 1, "completion": 1, "lan": "batch"}]}, "billing.prices[0].lan: unknown key; did you"),
        ({"prices": [{"prompt": 1, "completion": 1, "lane": "fast"}]}, "billing.prices[0].lane: "),
        ({"prices": [{"prompt": -1, "completion": 1}]}, "billing.prices[0]: prompt must be from 0"),
        ({"prices": [{"prompt": 1, "completion": "nan"}]}, "billing.prices[0]: completion must be from 0"),
        ({"prices": [{"prompt": 0.0000001, "completion": 1}]}, "with at most six decimals"),
        ({"prices": [{"prompt": 1, "completion": 1, "lane": "batch"}]}, "billing: prices: the last must name no"),
        ({"prices": [{"prompt": 1, "completion": 1, "since": "soon"}]}, "billing.prices[0].since: "),
        ({"retention_days": 0}, "billing: retention_days must be between"),
        ({"device_hour": -1}, "billing: device_hour must be from 0"),
    ],
)
def test_prices_that_mean_nothing_are_refused(billing, words):
    with pytest.raises(ConfigError) as caught:
        parse_config({"billing": billing}, {}, None)
    assert words in str(caught.value)


def test_a_query_has_defaults_that_a_bill_has():
    query = parse_query({})
    assert (query.since, query.until, query.group_by) == (
        today().replace(day=1),
        today(),
        ("tenant", "adapter", "lane"),
    )
    assert parse_query({"to": "2026-07-05"}).since == date(2026, 7, 1)
    assert parse_query({"group_by": "day,tenant"}).group_by == ("tenant", "day")
    assert parse_query({"group_by": "none"}).group_by == ()


@pytest.mark.parametrize(
    ("given_texts", "param"),
    [
        ({"from": "yesterday"}, "from"),
        ({"to": "2026-02-30"}, "to"),
        ({"from": "2026-08-02", "to": "2026-08-01"}, "from"),
        ({"lane": "fast"}, "lane"),
        ({"group_by": "tenant,model"}, "group_by"),
        ({"group_by": "day,day"}, "group_by"),
    ],
)
def test_a_query_that_means_nothing_is_refused(given_texts, param):
    with pytest.raises(ApiError) as caught:
        parse_query(given_texts)
    assert caught.value.param == param


def test_a_report_that_is_too_long_says_so(monkeypatch):
    monkeypatch.setattr(reports, "MAX_LINES", 2)
    many = [row(f"adapter-{number}", requests=1) for number in range(3)]
    assert len(tallied(many, group_by=("tenant",)).lines) == 1
    with pytest.raises(ApiError) as caught:
        tallied(many, group_by=("adapter",))
    assert caught.value.param == "group_by"


def test_filters_leave_the_rest_out():
    day = [row("pirate", requests=1), row("poet", requests=2), row("poet", "interactive", requests=4)]
    assert tallied(day, adapter="p*").total.counts.requests == 7
    assert tallied(day, adapter="poet", lane="batch").total.counts.requests == 2
    assert tallied(day, key="k2").lines == ()


@given(st.decimals(allow_nan=False, allow_infinity=False))
def test_money_is_written_so_that_nothing_is_lost(value):
    text = money(value)
    assert Decimal(text) == value
    assert "E" not in text


def test_a_line_names_what_it_was_asked_to_tell_apart():
    [line] = tallied([row(requests=1, device_us=1_500_000)], group_by=("tenant", "day")).lines
    fields = line_fields(line)
    assert (fields["tenant"], fields["day"], fields["device_seconds"]) == ("acme", "2026-07-31", 1.5)
    assert "adapter" not in fields
