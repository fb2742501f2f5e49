"""What the scripted telecom user reads in the agent's words: which tools to use, in order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from components.envs.base import ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class PhoneRequest:
    """One thing to do on the phone."""

    call: ToolCall
    wanted: bool | None = None
    """The state wanted of a switch, None: flip it once."""


SWITCHES: dict[str, tuple[str, str]] = {
    "toggle_airplane_mode": (r"air?plane mode", "Airplane Mode is now ON"),
    "toggle_data_saver_mode": (r"data saver(?: mode)?", "Data Saver Mode is now ON"),
    "toggle_roaming": (r"(?:data )?roaming", "Data Roaming is now ON"),
    "toggle_wifi_calling": (r"wi-?fi calling", "Wi-Fi Calling is now ON"),
    "toggle_wifi": (r"wi-?fi(?! calling)", "Wi-Fi is now ON"),
    "toggle_data": (r"(?:mobile|cellular) data", "Mobile Data is now ON"),
}
"""For each switch: its name in plain words, and what its answer says when it is now on."""

_VERB = r"\b(?:turn|turning|switch|toggle|enable|disable|activate|deactivate)\b"
_OFF = re.compile(r"\boff\b|\b(?:disable|deactivate)", re.I)
_ON = re.compile(r"\bon\b|\b(?:enable|activate)", re.I)
_LOOK = r"\b(?:check|look at|tell me|see|show\w*|verify|what(?:'s| is| does))\b[^.?!]*"
# Plain words for the tools without a switch. Where two match at one place, the earlier row wins.
_WORDS: tuple[tuple[str, str], ...] = (
    ("check_status_bar", r"\bstatus bar\b"),
    ("run_speed_test", r"\bspeed ?test\b"),
    ("check_network_mode_preference", rf"{_LOOK}\bnetwork (?:mode|type)\b"),
    ("set_network_mode_preference", r"\b(?:set|change|switch)\b[^.?!]*\bnetwork\b[^.?!]*"),
    ("check_network_status", r"\bnetwork status\b"),
    ("check_sim_status", rf"{_LOOK}\bsim\b"),
    ("reseat_sim_card", r"\b(?:re-?seat|re-?insert)\b[^.?!]*\bsim\b|\bremove\b[^.?!]*\bsim\b"),
    ("check_data_restriction_status", rf"\bdata restriction|{_LOOK}\bdata saver\b"),
    ("check_wifi_calling_status", rf"{_LOOK}\bwi-?fi calling\b"),
    ("check_wifi_status", rf"{_LOOK}\bwi-?fi\b(?! calling)"),
    ("disconnect_vpn", r"\b(?:disconnect|turn off|disable|switch off)\b[^.?!]*\bvpn\b"),
    ("connect_vpn", r"\bconnect\b[^.?!]*\bvpn\b"),
    ("check_vpn_status", rf"{_LOOK}\bvpn\b"),
    ("reset_apn_settings", r"\breset\b[^.?!]*\bapn\b"),
    ("check_apn_settings", rf"{_LOOK}\bapn\b"),
    ("reboot_device", r"\b(?:reboot|restart)\b|\bpower[- ]cycle\b"),
    ("can_send_mms", r"\b(?:try|check|test|can you|able to)\b[^.?!]*\b(?:mms|picture message)"),
    ("check_payment_request", rf"{_LOOK}\bpayment request\b"),
    ("make_payment", r"\bmake (?:the |a |your )?payment\b|\bpay (?:the|your|this) bill\b"),
    ("check_installed_apps", r"\binstalled apps\b"),
    ("grant_app_permission", r"\b(?:grant|allow|give)\b[^.?!]*\bpermissions?\b[^.?!]*"),
    ("check_app_permissions", rf"{_LOOK}\bpermissions?\b"),
    ("check_app_status", rf"{_LOOK}\bapp(?:'s)? status\b"),
)
_NAMES = (*SWITCHES, *(name for name, _ in _WORDS), "set_apn_settings")
_APPS = re.compile(r"\b(messaging|browser|facebook)\b", re.I)
_PERMISSIONS = re.compile(r"\b(storage|sms|(?:phone|network)(?= permission))\b", re.I)
_MODES = (
    (r"4g[^.?!]{0,12}5g|5g[^.?!]{0,12}4g", "4g_5g_preferred"),
    (r"\b5g\b", "4g_5g_preferred"),
    (r"\b(?:4g|lte)\b", "4g_only"),
    (r"\b3g\b", "3g_only"),
    (r"\b2g\b", "2g_only"),
)


# What the agent does itself ("I will enable roaming on the line"), unless the user is in it too.
_ITS_OWN = re.compile(
    r"\b(?:I(?:'ll| will| have|'ve|'m| am| can)|let me(?! know))\b(?![^.?!\n]*\byou\b)[^.?!\n]*",
    re.I,
)


def _blank(match: re.Match[str]) -> str:
    return " " * len(match[0])


def phone_requests(text: str) -> list[PhoneRequest]:
    """What an agent's text asks to be done on the phone.

    A tool's own name (``toggle_data``) counts wherever it stands; plain words count once for each
    tool. What needs an argument that the text does not give is left out.
    """
    found: dict[int, tuple[str, str]] = {}
    taken: set[str] = set()
    for match in re.finditer(r"\b[a-z]+(?:_[a-z]+)+\b", text):
        if match[0] in _NAMES:
            found[match.start()] = (match[0], _sentence(text, match.start()))
            taken.add(match[0])
    plain = re.sub(r"\b[a-z]+(?:_[a-z]+)+\b", _blank, _ITS_OWN.sub(_blank, text))
    for name, words in _switch_words() + _WORDS:
        match = re.search(words, plain, re.I)
        if match and name not in taken and match.start() not in found:
            found[match.start()] = (name, _sentence(text, match.start()))
            taken.add(name)
    requests = []
    for _, (name, said) in sorted(found.items()):
        requests += _with_arguments(name, said)
    return requests


def _switch_words() -> tuple[tuple[str, str], ...]:
    return tuple(
        (tool, rf"{_VERB}[^.?!]{{0,40}}?\b{words}") for tool, (words, _) in SWITCHES.items()
    )


def _sentence(text: str, place: int) -> str:
    """The sentence around a place; arguments may hold full stops of their own, so not by those."""
    start = max(text.rfind(mark, 0, place) for mark in ("\n", ". ", "? ", "! ")) + 1
    ends = [text.find(mark, place) for mark in ("\n", ". ", "? ", "! ")]
    return text[start : min((end for end in ends if end >= 0), default=len(text))]


def _with_arguments(name: str, said: str) -> Sequence[PhoneRequest]:
    """The calls of one tool, with the arguments that the sentence gives."""
    if name in SWITCHES:
        off, on = _OFF.search(said), _ON.search(said)
        wanted = None if bool(off) == bool(on) else bool(on)
        return [PhoneRequest(call=ToolCall(name=name, arguments={}), wanted=wanted)]
    if name == "set_network_mode_preference":
        named = re.search(r"\b(?:4g_5g_preferred|4g_only|3g_only|2g_only)\b", said)
        modes = [mode for words, mode in _MODES if re.search(words, said, re.I)]
        mode = named[0] if named else next(iter(modes), None)
        return _calls(name, [{"mode": mode}] if mode else [])
    apps = [app.lower() for app in _APPS.findall(said)]
    if name == "grant_app_permission":
        granted = dict.fromkeys(p.lower() for p in _PERMISSIONS.findall(said))
        app = apps[0] if apps else "messaging"
        return _calls(name, [{"app_name": app, "permission": p} for p in granted])
    if name in ("check_app_permissions", "check_app_status"):
        return _calls(name, [{"app_name": apps[0] if apps else "messaging"}])
    if name == "set_apn_settings":
        return []
    return _calls(name, [{}])


def _calls(name: str, arguments: Sequence[dict[str, str]]) -> list[PhoneRequest]:
    return [PhoneRequest(call=ToolCall(name=name, arguments=given)) for given in arguments]
