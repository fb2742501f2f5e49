"""Databases that share a base: isolation, and digests that are equal where the hashes are."""

import gc
import random
import threading
import weakref

import pytest

from components.envs.base import Message, ToolCall
from components.envs.tau2 import Tau2Env
from components.envs.tau2_data import domain_data, task_ids
from components.envs.tau2_records import digest


def change(database, rng):
    """One random change to a retail database, of which some undo others."""
    key = rng.choice(sorted(database.orders)[:3])
    kind = rng.randrange(6)
    if kind == 0:
        database.orders[key].status = rng.choice(["cancelled", "pending"])
    elif kind == 1:
        database.orders.get(key).cancel_reason = rng.choice([None, "ordered by mistake"])
    elif kind == 2:
        database.users[sorted(database.users)[0]].email = rng.choice(["a", "b"])
    elif kind == 3:
        database.orders.update({key: database.orders[key].model_copy(deep=True)})
    elif kind == 4 and len(database.orders) > 998:
        del database.orders[key]
    else:
        assert database.products[sorted(database.products)[0]]  # looked at, not changed


def test_digests_are_equal_exactly_where_hashes_are():
    build = domain_data("retail").build
    rng = random.Random(0)
    seen = []
    for _ in range(12):
        database = build().tools.db
        for _ in range(rng.randrange(4)):
            change(database, rng)
        seen.append((digest(database), database.get_hash()))
    assert len({official for _, official in seen}) > 3
    for ours, official in seen:
        for other, other_official in seen:
            assert (ours == other) == (official == other_official)


def test_number_types_count_as_in_the_hash():
    """1, 1.0 and True are equal in Python and three texts in JSON."""
    build = domain_data("retail").build
    databases = [build().tools.db for _ in range(3)]
    for value, database in zip((1, 1.0, True), databases, strict=True):
        user = database.users[sorted(database.users)[0]]
        next(iter(user.payment_methods.values())).__dict__["extra"] = value
        database.orders[sorted(database.orders)[0]].__dict__["status"] = value
    hashes = {database.get_hash() for database in databases}
    assert len(hashes) == 3
    assert len({str(digest(database)) for database in databases}) == 3


def test_records_refuse_what_would_go_unseen():
    orders = domain_data("retail").build().tools.db.orders
    with pytest.raises(TypeError, match="popitem"):
        orders.popitem()
    with pytest.raises(TypeError, match="use update"):
        orders |= {}


def test_a_broken_vpn_stays_with_its_own_environment():
    """tau2 keeps the default VPN on a class: one environment's change meets all later ones."""
    from tau2.domains.telecom.user_tools import TelecomUserTools

    build = domain_data("telecom").build
    before = TelecomUserTools.default_vpn_details.model_copy(deep=True)
    first, second = build(), build()
    first.user_tools.break_vpn()
    second.user_tools.connect_vpn()
    assert first.user_tools.db.device.vpn_details.server_performance.value == "poor"
    assert second.user_tools.db.device.vpn_details.server_performance.value == "excellent"
    third = build()
    third.user_tools.connect_vpn()
    assert third.get_user_db_hash() == second.get_user_db_hash()
    assert before == TelecomUserTools.default_vpn_details


@pytest.mark.parametrize("domain", ["retail", "airline", "telecom", "mock"])
def test_close_frees_everything(domain):
    threads = threading.active_count()
    env = Tau2Env(domain=domain)
    env.reset(seed=0, options={"task_id": task_ids(domain, "test")[0]})
    call = ToolCall(id="c", name="transfer_to_human_agents", arguments={"summary": "-"})
    env.step(Message(role="assistant", tool_calls=(call,)))
    held = [weakref.ref(env.tau2_environment), weakref.ref(env.tau2_environment.tools.db)]
    env.close()
    gc.collect()
    assert [reference() for reference in held] == [None, None]
    assert threading.active_count() == threads
