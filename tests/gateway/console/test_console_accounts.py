"""Tenants, their keys and their batches in the console, in a real browser."""

from __future__ import annotations

import pytest
from batch_fakes import claimed, wanted
from console_page import Console, until
from fakes import BASE

from gateway.batches.record import Batch
from gateway.batches.store import BatchStore


def test_a_tenant_and_its_key_are_created_and_the_key_is_shown_once(console):
    page, accounts = console.page, console.accounts
    console.enter(view="tenants")
    form = page.get_by_role("form", name="Create a tenant")
    form.get_by_label("Name").fill("initech")
    form.get_by_label("Adapters it may use").fill("poet, pir*")
    form.get_by_label("Default lane").select_option("batch")
    form.get_by_role("button", name="Create").click()
    card = page.get_by_role("region", name="Tenant initech")
    card.wait_for()
    tenant = accounts.records["tenant/initech"].tenant
    assert (tenant.adapters, tenant.default_lane.name) == (("poet", "pir*"), "BATCH")
    assert form.get_by_label("Name").input_value() == ""
    card.get_by_text("Keys", exact=True).click()
    card.get_by_text("It has no keys yet").wait_for()
    card.get_by_label("Label of a new key of initech").fill("<b>laptop</b>")
    card.get_by_role("button", name="Create a key").click()
    key = card.locator(".new-key code").inner_text()
    assert accounts.authenticate(key).tenant.name == "initech"
    card.get_by_role("button", name="Done").click()
    card.get_by_text("<b>laptop</b>").wait_for()
    assert key not in page.content(), "it is nowhere any more"
    card.get_by_role("button", name="Disable").click()
    card.get_by_text("Really disable?").click()
    card.get_by_text("disabled", exact=True).wait_for()
    assert [record.disabled for record in accounts.records.values() if record.key] == [True]
    card.get_by_role("button", name="Enable").click()
    until(lambda: accounts.authenticate(key).tenant.name == "initech")


def test_a_tenant_that_cannot_be_is_refused_and_the_form_stays_as_it_was(console):
    page = console.page
    console.enter(view="tenants")
    form = page.get_by_role("form", name="Create a tenant")
    form.get_by_label("Name").fill("no spaces, please")
    form.get_by_role("button", name="Create").click()
    page.locator(".toast.bad").wait_for()
    assert form.get_by_label("Name").input_value() == "no spaces, please"
    assert not console.accounts.records


@pytest.fixture
def usage_read_often(monkeypatch):
    monkeypatch.setattr("gateway.http.routes.admin.traffic.USAGE_SECONDS", 0.2)


def test_what_a_tenant_used_names_the_time_that_it_covers(usage_read_often, console):
    page, looks = console.page, console.gateway.gateway_app.usage.last_minute
    now = 1000.0
    looks._clock = lambda: now
    console.enter(view="tenants")
    page.get_by_role("region", name="Tenant acme").get_by_text("Nothing used today").wait_for()
    assert console.chat().status_code == 200
    until(lambda: BASE in console.usage())
    spent = page.get_by_role("region", name="Tenant acme").locator(".spent")
    now += 30
    until(lambda: spent.inner_text().startswith("Last 30 s: "))
    now += 30
    until(lambda: spent.inner_text().startswith("Last minute: "))
    now += 200
    until(lambda: spent.inner_text().startswith("Last minute: known in a few seconds · today: "))


def batches_of(console: Console) -> tuple[Batch, Batch]:
    """One of acme's that runs, and one of globex's that has ended."""
    store = BatchStore(console.redis, timeout=30.0)

    async def made() -> tuple[Batch, Batch]:
        await store.create(wanted("globex"), 9)
        await store.invalid(await claimed(store, "validate"), [])
        await store.create(wanted("acme"), 9)
        await store.validated(await claimed(store, "validate"), 40, "pirate")
        return (await store.list("acme"))[0][0], (await store.list("globex"))[0][0]

    return console.gateway.run(made())


def test_batches_are_seen_and_cancelled(console):
    page, (open_batch, ended) = console.page, batches_of(console)
    console.enter(view="batches")
    rows = page.get_by_role("region", name="Batches").locator("tbody tr:visible:not([data-empty])")
    until(lambda: rows.count() == 1)
    assert "pirate in progress" in rows.inner_text() and "0 of 40 lines" in rows.inner_text()
    page.get_by_role("button", name="Newest").click()
    until(lambda: rows.count() == 2)
    found = rows.filter(has_text=ended.id)
    assert "failed" in found.inner_text() and "globex" in found.inner_text() and "ended" in found.inner_text()
    assert not found.get_by_role("button").is_visible(), "nothing is left of it to cancel"
    tenant = page.get_by_label("Tenant")
    for name, listed in (("globex", [ended.id]), ("acme", [open_batch.id]), ("hooli", [])):
        tenant.fill(name)
        tenant.press("Enter")
        page.get_by_role("heading", name=f"Newest of {name}").wait_for()
        until(lambda: [row.split(" · ")[0] for row in rows.locator("small").all_inner_texts()] == listed)  # noqa: B023
    page.get_by_text("There is no batch").wait_for()
    page.get_by_role("button", name="Unfinished").click()
    tenant.fill("")
    tenant.press("Enter")
    until(lambda: rows.count() == 1)
    rows.get_by_role("button", name="Cancel").click()
    rows.get_by_text("Really cancel?").click()
    rows.get_by_text("cancelling").wait_for()
    [batch] = console.gateway.run(console.batches.of_tenant("acme"))
    assert batch.status == "cancelling"
