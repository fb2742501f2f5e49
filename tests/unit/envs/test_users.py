"""The scripted user: what it says, when, and what it never looks at."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from components.envs.first_person import first_person
from components.envs.scenario import read_scenario
from components.envs.tau2 import Tau2Env
from components.envs.tau2_data import domain_data, find_task
from components.envs.user_phrases import MOCK_PHRASES, PHRASES
from components.envs.users import STOP, TRANSFER, make_scripted_user

GREETING = "Hi! How can I help you today?"
WHO = "Could you give me your email address, or your name and zip code?"
TIERS = json.loads((Path(__file__).parents[2] / "data/retail_scripted_tiers.json").read_text())


class NoGold:
    """A task of which only the id and the scenario may be read."""

    def __init__(self, task):
        self.id = task.id
        self.user_scenario = task.user_scenario

    def __getattr__(self, name):
        raise AssertionError(f"the user read {name}")


def talk(task_id, *agent, domain="retail", seed=0, paraphrases="train"):
    """The user's replies to the greeting and then to each text."""
    task = NoGold(find_task(domain, task_id))
    user = make_scripted_user(domain, task, seed, paraphrases=paraphrases)
    return [user.reply(text) for text in (GREETING, *agent)]


def secrets(task):
    """What identifies the user of a task: e-mails, zips, the full name."""
    who = read_scenario(task.user_scenario).identity
    return [*who.emails, *who.zips, *who.names]


@pytest.fixture(scope="module")
def retail():
    return domain_data("retail").tasks


def test_identity_is_known_for_every_retail_task(retail):
    customers = domain_data("retail").build().tools.db.users.values()
    by_email = {user.email for user in customers}
    by_name = {
        (f"{user.name.first_name} {user.name.last_name}", user.address.zip) for user in customers
    }
    for task in retail.values():
        who = read_scenario(task.user_scenario).identity
        pairs = {(name, zip_code) for name in who.names for zip_code in who.zips}
        assert set(who.emails) & by_email or pairs & by_name, task.id


def test_identity_is_given_only_when_asked(retail):
    agent = (
        "Let me see what I can do.",
        "Which item do you mean?",
        "I will exchange it. Do you confirm (yes/no)?",
        "Is there anything else you need?",
    )
    for task in retail.values():
        said = "\n".join(talk(task.id, *agent))
        assert not [secret for secret in secrets(task) if secret in said], task.id
        told = talk(task.id, WHO)[1]
        assert any(secret in told for secret in secrets(task)), task.id


def test_all_of_the_request_is_in_first_person(retail):
    for domain in ("retail", "airline"):
        for task in domain_data(domain).tasks.values():
            scenario = read_scenario(task.user_scenario)
            for text in (*scenario.goals, *(r.text for r in scenario.reactions)):
                bad = re.search(
                    r"\bthe agent\b|\byou (?:want|are|wish|have|prefer|received)\b|\bme want|"
                    r"\bI (?:is|has|are)\b|\b(?:for|to|with) I\b|\byour(?:self)?\b",
                    text,
                )
                assert bad is None, (domain, task.id, text)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("You are angry and your card is lost.", "I am angry and my card is lost."),
        ("You'd go for no backlight.", "I'd go for no backlight."),
        ("You wonder if the agent can help you.", "I wonder if you can help me."),
        ("Do whatever saves you most money.", "Do whatever saves me most money."),
        ("Ask the agent how much you can save.", "Please tell me how much I can save."),
        ("You ask the agent to do it yourself.", "Please do it myself."),
        ("You name is Mei Ahmed.", "My name is Mei Ahmed."),
    ],
)
def test_first_person(told, said):
    assert first_person(told) == said


def test_opens_with_the_reason():
    (opening,) = talk("73")
    assert "return everything I just bought except the coffee machine" in opening


def test_email_or_name_and_zip():
    assert "lucas.brown9344@example.com" in talk("103", WHO)[1]
    asked_for_email, asked_for_name = talk(
        "0", "What is your email?", "Your name and zip, please?"
    )[1:]
    assert "19122" not in asked_for_email
    assert "Rossi" not in asked_for_email
    assert "Yusuf Rossi" in asked_for_name
    assert "19122" in asked_for_name


def test_wrong_identity_first_then_right():
    again = "I could not find that account. " + WHO
    first, second = talk("106", WHO, again)[1:]
    assert "sofia.thomas3019@example.com" in first
    assert "sofia.thomas3069@example.com" in second
    zips = [re.search(r"\d{5}", reply)[0] for reply in talk("67", WHO, again, again)[1:]]
    assert zips == ["98178", "98186", "98187"]


def test_order_numbers_come_from_their_queue():
    ask = "What is the order number?"
    replies = talk("46", ask, f"I could not find it. {ask}", f"I could not find it. {ask}")[1:]
    assert "9502126" in replies[0]
    assert "9502127" in replies[1]
    assert "W" in replies[2]


def test_slots():
    pay = "Which payment method would you like to use?"
    assert "PayPal" in talk("52", pay)[1]
    assert talk("0", pay)[1] in PHRASES["train"]["payment"]
    why = "What is the reason: no longer needed, or ordered by mistake?"
    assert talk("113", why)[1] == "I ordered the items by mistake."
    assert "mistake" in talk("113", why, why)[2]
    assert talk("66", why)[1] in PHRASES["train"]["reason"]
    assert "101 Highway, New York, 10001" in talk("22", "What is the new address?")[1]
    assert "15-inch, 32GB" in talk("93", "Which laptop do you mean?")[1]
    assert "keyboard and a mouse" in talk("13", "Which items do you mean?")[1]
    assert talk("0", "What is your favourite colour of the sea?")[1] in PHRASES["train"]["unknown"]


def test_confirms_what_is_proposed():
    listing = "I will cancel order #W1. Do you confirm (yes/no)?"
    assert talk("113", listing)[1].startswith("Yes")
    # The scenario has another wish on the first confirmation; said once, then consent.
    change, yes = talk("72", listing, listing)[1:]
    assert "PayPal" in change
    assert not change.startswith("Yes")
    assert yes.startswith("Yes")


def test_an_offer_after_a_refusal_meets_the_scenarios_own_condition():
    reply = talk("28", "I cannot cancel one item. Would you like to cancel the whole order?")[1]
    assert "forget about it" in reply
    assert not reply.startswith("Yes")


def test_goals_one_by_one_then_stop():
    opening, second, third, end = talk(
        "98",
        "The exchange is requested.",
        "Done. Anything else?",
        "It is cancelled. Anything else?",
    )
    assert "Bicycle" in opening
    assert "Jigsaw" in opening
    assert "camera" not in opening
    assert "camera" in second
    assert "skateboard" not in second
    assert "skateboard" in third
    assert end == STOP


def test_does_not_leave_before_anything_was_done():
    reply, end = talk("73", "Is there anything else you need?", "Anything else?")[1:]
    assert reply in PHRASES["train"]["all"]
    assert end == STOP


def test_transfer():
    text = "YOU ARE BEING TRANSFERRED TO A HUMAN AGENT. PLEASE HOLD ON."
    assert talk("73", text)[1] == TRANSFER


def test_leaves_after_three_turns_without_news():
    replies = talk("73", "Hmm.", "Hmm.", "Hmm.")[1:]
    assert [reply == STOP for reply in replies] == [False, False, True]
    asked = talk("0", *[WHO] * 4)[1:]
    assert [reply == STOP for reply in asked] == [False, False, False, True]


def test_seed_chooses_phrasings_only():
    agent = (WHO, "Do you confirm (yes/no)?", "It is done. Anything else?")
    conversations = [tuple(talk("103", *agent, seed=seed)) for seed in range(8)]
    assert conversations == [tuple(talk("103", *agent, seed=seed)) for seed in range(8)]
    assert len(set(conversations)) > 1
    for conversation in conversations:
        assert "lucas.brown9344@example.com" in conversation[1]
        assert "backpack" in conversation[3]


def test_phrase_sets_are_disjoint_and_answer_the_same():
    assert len(PHRASES) >= 2
    train, held_out = PHRASES["train"], PHRASES["held_out"]
    assert train.keys() == held_out.keys()
    assert not {p for ps in train.values() for p in ps} & {
        p for ps in held_out.values() for p in ps
    }
    for key in train:
        places = {phrase.count("{0}") for phrase in (*train[key], *held_out[key])}
        assert len(places) == 1, key
    replies = talk("0", WHO, "Do you confirm (yes/no)?", paraphrases="held_out")
    assert "Yusuf Rossi" in replies[1]
    assert "19122" in replies[1]
    assert replies[2] in held_out["yes"]
    assert replies[2] not in train["yes"]


@pytest.mark.parametrize("paraphrases", ["train", "held_out"])
@pytest.mark.parametrize("domain", ["retail", "mock"])
def test_an_environment_speaks_in_the_set_that_it_was_given(domain, paraphrases):
    sets = {"retail": PHRASES, "mock": MOCK_PHRASES}[domain]
    env = Tau2Env(domain=domain, paraphrases=paraphrases)
    task_id = {"retail": "0", "mock": "create_task_1"}[domain]
    for seed in range(4):
        _, info = env.reset(seed=seed, options={"task_id": task_id})
        hello = info["messages"][-1].content
        spoken = {name for name in sets for hi in sets[name]["hello"] if hello.startswith(hi)}
        assert spoken == {paraphrases}


def test_every_yes_reads_as_one():
    for phrases in PHRASES.values():
        assert all(yes.startswith("Yes") for yes in phrases["yes"])


def test_airline_and_mock_are_played():
    opening, user_id = talk("0", "Could I have your user id?", domain="airline")
    assert "EHGLP3" in opening
    assert "emma_kim_9957" not in opening
    assert "emma_kim_9957" in user_id
    mock = domain_data("mock").tasks
    user = make_scripted_user("mock", next(iter(mock.values())), 0)
    assert user.reply(GREETING).strip()


def test_bad_input_is_named():
    task = find_task("retail", "0")
    with pytest.raises(ValueError, match="'banking'"):
        make_scripted_user("banking", task, 0)
    with pytest.raises(ValueError, match=r"'heldout' is none of .* did you mean 'held_out'\?"):
        Tau2Env(domain="retail", paraphrases="heldout")
    with pytest.raises(ValueError, match="telecom's scripted user has one set"):
        Tau2Env(domain="telecom", paraphrases="held_out")
    with pytest.raises(ValueError, match="'fancy' is none of train, held_out"):
        make_scripted_user("retail", task, 0, paraphrases="fancy")
    bare = SimpleNamespace(id="0", user_scenario=SimpleNamespace(instructions="Be kind."))
    with pytest.raises(ValueError, match="reason_for_call"):
        make_scripted_user("retail", bare, 0)


def test_tiers_cover_retail():
    tiers = [TIERS[name] for name in TIERS if name != "no_gold_write"]
    assert sorted(i for tier in tiers for i in tier) == sorted(domain_data("retail").tasks)
