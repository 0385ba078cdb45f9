"""Tools, and what users ask that needs them.

The tools here are the usual ones, each with several ways to ask for it. `invented` makes new ones, so that reading the
definitions is learnt, and not the list. `HELD_OUT` are tools that are never learnt from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from training.text import arithmetic
from training.text import words as w
from training.text.example import Tool

Draw = Callable[[Random], Any]


@dataclass(frozen=True, eq=False)
class Parameter:
    name: str
    schema: dict[str, Any]
    draw: Draw
    descriptions: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Kind:
    """A tool: `asks` mention every required parameter as {name}; `result` is what calling it may return."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    asks: tuple[str, ...]
    result: Draw
    # Said only sometimes, after the question: (parameter, how it is said). Not required.
    optional: tuple[tuple[Parameter, str], ...] = ()


def _text(name: str, draw: Draw, *descriptions: str, choices: tuple[str, ...] = ()) -> Parameter:
    schema: dict[str, Any] = {"type": "string"}
    return Parameter(name, schema | {"enum": list(choices)} if choices else schema, draw, descriptions)


def _choice(name: str, *choices: str) -> Parameter:
    return _text(name, lambda rng: rng.choice(choices), choices=choices)


def _integer(name: str, low: int, high: int, *descriptions: str) -> Parameter:
    return Parameter(name, {"type": "integer"}, lambda rng: rng.randint(low, high), descriptions)


def _number(name: str, low: int, high: int, *descriptions: str) -> Parameter:
    return Parameter(
        name,
        {"type": "number"},
        lambda rng: rng.randint(low, high) if rng.random() < 0.6 else round(rng.uniform(low, high), 1),
        descriptions,
    )


def _json(**draws: Draw) -> Draw:
    return lambda rng: json.dumps({key: draw(rng) for key, draw in draws.items()}, ensure_ascii=False)


def one_of(*options: Any) -> Draw:
    return lambda rng: rng.choice(options)


def _done(rng: Random) -> str:
    return str(rng.choice(("ok", "done", "success", '{"status": "ok"}', '{"ok": true}', "sent")))


def _topic(rng: Random) -> str:
    return w.phrase(rng, 1, 4) if rng.random() < 0.6 else str(rng.choice(w.TOPICS))


def _sentence(rng: Random) -> str:
    return w.phrase(rng, 2, 7)


def _time(rng: Random) -> str:
    return f"{rng.randint(0, 23)}:{rng.choice(('00', '15', '30', '45'))}"


def _date(rng: Random) -> str:
    return f"{rng.randint(2020, 2030)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def _file(rng: Random) -> str:
    return f"{w.noun(rng)}.{rng.choice(('txt', 'py', 'md', 'json', 'csv', 'pdf'))}"


def _mail(rng: Random) -> str:
    return f"{w.name(rng).lower()}@{w.noun(rng)}.{rng.choice(('com', 'org', 'net'))}"


_CITY = _text("city", w.city, "The city", "Name of the city", "City name", "e.g. Paris")
_LOCATION = _text(
    "location",
    lambda rng: f"{w.city(rng)}, {rng.choice(w.COUNTRIES)}" if rng.random() < 0.15 else w.city(rng),
    "The city",
    "The city and state, e.g. San Francisco, CA",
    "City name, e.g. Berlin",
    "City and country e.g. Bogotá, Colombia",
    "Where",
)
_UNIT = _choice("unit", "celsius", "fahrenheit")
_WEATHER_ASKS = (
    "What is the weather in {x}?", "What's the weather like in {x}?", "How is the weather in {x}?", "Weather in {x}",
    "Tell me the weather in {x}.", "Is it raining in {x}?", "How warm is it in {x}?", "Do I need an umbrella in {x}?",
    "What is the weather like in {x} today?", "what's the temperature in {x} right now?", "How cold is it in {x}?",
)  # fmt: skip
_WEATHER = _json(
    temperature=lambda rng: rng.randint(-20, 40),
    condition=one_of("sunny", "rainy", "cloudy", "windy", "snow", "clear"),
)
_A, _B = _integer("a", 0, 999, "First number"), _integer("b", 0, 999, "Second number")


def _asks(name: str, *texts: str) -> tuple[str, ...]:
    return tuple(text.replace("{x}", "{" + name + "}") for text in texts)


COMMON: Final = (
    Kind(("get_weather", "weather", "get_current_weather", "current_weather"),
         ("Get the weather in a city", "Current weather", "Returns the weather for a city.", "Get the current weather"),
         (_CITY,), _asks("city", *_WEATHER_ASKS), _WEATHER, ((_UNIT, "Use {unit}."), (_UNIT, "In {unit}, please."))),
    Kind(("get_weather", "get_current_weather", "get_forecast", "fetch_weather"),
         ("Get the current weather in a given location", "Get the weather", "Weather at a location", "Weather data",
          "Get current temperature for a given location.", "Returns temperature and sky", "Current conditions outside"),
         (_LOCATION,), _asks("location", *_WEATHER_ASKS), _WEATHER, ((_UNIT, "Use {unit}."), (_UNIT, "In {unit}, please."))),
    Kind(("add", "add_numbers", "sum", "plus"), ("Add two numbers", "Adds a and b.", "Returns the sum of two numbers"),
         (_A, _B), tuple(t for t in arithmetic.ADD if "Add {b}" not in t), lambda rng: str(rng.randint(10, 1998))),
    Kind(("subtract", "minus", "difference"), ("Subtract b from a", "Subtracts two numbers", "Returns a minus b"),
         (_A, _B), tuple(t for t in arithmetic.SUBTRACT if "Take" not in t and "Sub" not in t),
         lambda rng: str(rng.randint(0, 900))),
    Kind(("multiply", "multiply_numbers", "times", "product"), ("Multiply two numbers", "Returns the product of a and b"),
         (_A, _B), ("What is {a} * {b}?", "What is {a} times {b}?", "Multiply {a} by {b}.", "{a} * {b}"),
         lambda rng: str(rng.randint(0, 9999))),
    Kind(("calculator", "calculate", "evaluate", "compute"), ("Evaluate an expression", "A calculator", "Does arithmetic"),
         (_text("expression", lambda rng: f"{rng.randint(0, 999)} {rng.choice('+-*/')} {rng.randint(1, 999)}",
                "The expression to evaluate", "e.g. 2 + 3"),),
         ("What is {expression}?", "Calculate {expression}.", "Compute {expression}", "How much is {expression}?", "{expression}"),
         lambda rng: str(rng.randint(0, 9999))),
    Kind(("search", "web_search", "search_web", "google"), ("Search the web", "Searches the internet for a query.", "Web search"),
         (_text("query", _topic, "What to search for", "The search query", "Search terms"),),
         ("Search for {query}.", "Search the web for {query}.", "Find information about {query}.", "Look up {query}.",
          "Google {query}", "Can you search for {query}?", "Look for {query} on the web."),
         lambda rng: w.phrase(rng, 3, 9)),
    Kind(("get_time", "current_time", "time_in", "get_current_time"), ("Get the time in a city", "The current time in a city"),
         (_CITY,), ("What time is it in {city}?", "Tell me the time in {city}.", "What's the time in {city}?",
                    "Current time in {city}", "How late is it in {city}?"),
         lambda rng: _time(rng)),
    Kind(("now", "current_date", "get_date", "today"), ("Get today's date", "The current date", "Returns the date of today."),
         (), ("What day is it today?", "What is the date?", "What is today's date?", "Which day is today?", "Today's date, please."),
         lambda rng: _date(rng)),
    Kind(("send_message", "message", "send_text"), ("Send a message to somebody", "Sends a text message."),
         (_text("to", w.name, "Who gets it", "The recipient"), _text("text", _sentence, "The message", "What to say")),
         ("Send {to} the message: {text}", 'Tell {to} "{text}"', "Write to {to}: {text}", 'Send "{text}" to {to}.',
          "Text {to}: {text}"), _done),
    Kind(("send_email", "email", "write_email"), ("Send an email", "Sends an email to an address."),
         (_text("to", _mail, "The address"), _text("subject", _sentence, "The subject line")),
         ("Send an email to {to} about {subject}", "Email {to} with the subject {subject}", "Write to {to} about {subject}"), _done),
    Kind(("set_timer", "timer", "start_timer"), ("Set a timer", "Starts a timer."),
         (_integer("minutes", 1, 120, "How many minutes"),),
         ("Set a timer for {minutes} minutes.", "Timer: {minutes} minutes", "Remind me in {minutes} minutes.",
          "Wake me in {minutes} minutes", "Start a timer of {minutes} minutes."), _done),
    Kind(("add_event", "create_event", "schedule"), ("Add an event to the calendar", "Create a calendar event"),
         (_text("title", _sentence, "What it is"), _text("date", _date, "YYYY-MM-DD", "The day"), _text("time", _time, "HH:MM")),
         ("Add {title} to my calendar on {date} at {time}.", "Schedule {title} for {date} at {time}.",
          "Put {title} into the calendar: {date}, {time}"), _done),
    Kind(("translate", "translate_text"), ("Translate a text", "Translates text into another language."),
         (_text("text", _sentence, "The text"), _text("language", one_of(*w.LANGUAGES), "The target language")),
         ("Translate '{text}' into {language}.", "How do you say '{text}' in {language}?",
          "Translate {text} to {language}"), lambda rng: w.phrase(rng, 2, 6)),
    Kind(("convert_currency", "exchange", "currency"), ("Convert money", "Converts an amount between currencies."),
         (_number("amount", 1, 999, "How much"), _choice("from", "EUR", "USD", "GBP"), _choice("to", "JPY", "CHF", "INR")),
         ("Convert {amount} {from} to {to}.", "How much is {amount} {from} in {to}?", "{amount} {from} in {to}"),
         lambda rng: str(round(rng.uniform(1, 9999), 2))),
    Kind(("play_song", "play_music", "play"), ("Play a song", "Plays music."),
         (_text("title", _sentence, "The song"),), ("Play {title}", "Play the song {title}", "I want to hear {title}",
                                                     "Put on {title}"), _done),
    Kind(("read_file", "open_file", "cat"), ("Read a file", "Returns what is in a file."),
         (_text("path", _file, "The file's path", "Which file"),), ("Read {path}", "What is in {path}?", "Show me the file {path}",
                                                                   "Open {path}"), lambda rng: w.phrase(rng, 3, 9)),
    Kind(("turn_on", "switch_on", "light_on"), ("Switch a device on", "Turn something on"),
         (_text("device", lambda rng: f"{w.noun(rng)} {rng.choice(w.OBJECTS)}", "Which device"),),
         ("Turn on the {device}.", "Switch the {device} on.", "Switch on the {device}, please."), _done),
    Kind(("set_temperature", "heating"), ("Set the temperature of a room", "Controls the heating."),
         (_text("room", one_of(*w.ROOMS), "Which room"), _integer("degrees", 5, 30, "Degrees")),
         ("Set the {room} to {degrees} degrees.", "Make it {degrees} degrees in the {room}.", "Heat the {room} to {degrees} degrees"),
         _done),
    Kind(("buy", "order", "add_to_cart"), ("Buy something", "Put an item into the shopping cart"),
         (_text("item", w.noun, "What to buy"), _integer("quantity", 1, 99, "How many")),
         ("Buy {quantity} of {item}.", "I want to order {quantity} {item}.", "Order {quantity} {item}", "Buy {quantity} {item}, please."),
         _done),
    Kind(("get_user", "find_user", "lookup_user"), ("Look up a user", "Finds a user by id."),
         (_integer("id", 1, 99999, "The user's id"),), ("Who is user {id}?", "Look up user {id}.", "Show user {id}", "Find the user {id}."),
         _json(name=w.name, age=lambda rng: rng.randint(18, 90))),
    Kind(("run_command", "shell", "bash", "execute"), ("Run a shell command", "Executes a command in the shell."),
         (_text("command", lambda rng: rng.choice(("ls {}", "cat {}", "rm {}", "mkdir {}", "grep {}")).format(w.noun(rng)), "The command"),),
         ("Run {command}", "Execute {command}", "Run the command {command}"), lambda rng: w.phrase(rng, 1, 6)),
)  # fmt: skip

HELD_OUT: Final = (
    Kind(("get_stock_price",), ("Get the price of a stock",), (_text("symbol", one_of("AAPL", "TSLA", "NVDA", "SAP"), "The ticker symbol"),),
         ("What is the stock price of {symbol}?", "Get the price of {symbol}.", "What does {symbol} stock cost?"),
         _json(price=lambda rng: rng.randint(1, 900))),
    Kind(("book_table",), ("Book a table in a restaurant",),
         (_text("restaurant", one_of("Bellavista", "Chez Marcel", "Golden Wok"), "The restaurant"), _integer("people", 2, 9, "How many people")),
         ("Book a table at {restaurant} for {people} people.", "I need a table for {people} people at {restaurant}."), _done),
    Kind(("track_parcel",), ("Track a parcel by its number",), (_integer("number", 10000, 99999, "The parcel's number"),),
         ("Where is my parcel {number}?", "Track parcel {number}."), _json(place=w.city)),
    Kind(("find_flights",), ("Find flights between two cities",), (_text("origin", w.city, "Where from"), _text("destination", w.city, "Where to")),
         ("Find flights from {origin} to {destination}.", "I want to fly from {origin} to {destination}."),
         _json(flights=lambda rng: rng.randint(1, 9))),
    Kind(("set_volume",), ("Set the volume of the speaker",), (_integer("level", 0, 100, "The volume"),),
         ("Set the volume to {level}.", "Volume {level}, please."), _done),
    Kind(("delete_note",), ("Delete a note",), (_text("title", _sentence, "The note's title"),),
         ("Delete the note {title}", "Remove my note {title}"), _done),
)  # fmt: skip

_VERBS = (
    "get find show list count open close start stop check read write make create delete remove update move copy save load "
    "send book cancel measure draw paint cook clean wash build repair sell rent paint print scan lock unlock feed water"
).split()


def invented(rng: Random) -> Kind:
    """A tool that has never been: verb_noun, with one to three parameters that the request names."""
    verb, noun = rng.choice(_VERBS), w.noun(rng)
    parameters = tuple(_invented_parameters(rng, rng.choice((0, 1, 1, 1, 2, 2, 3))))
    said = [f"{p.name} {{{p.name}}}" for p in parameters]
    ending = f" with {w.joined(said)}" if said else ""
    if len(parameters) == 1 and rng.random() < 0.6:
        ending = f" {rng.choice(('for', 'of', 'in', 'from', 'at', 'to'))} {{{parameters[0].name}}}"
    name = rng.choice(
        (
            f"{verb}_{noun}",
            f"{verb}_{noun}",
            f"{noun}_{verb}",
            verb + noun.capitalize(),
            f"{noun}.{verb}",
            f"{verb}-{noun}",
        )
    )
    asks = tuple(
        start.format(v=verb, V=verb.capitalize(), n=noun) + ending + stop for start, stop in _INVENTED_ASKS
    )
    descriptions = (
        f"{verb.capitalize()} the {noun}",
        f"{verb.capitalize()} a {noun}.",
        f"Use this to {verb} the {noun}.",
    )
    return Kind((name,), descriptions, parameters, asks, _invented_result)


_INVENTED_ASKS = (
    ("{V} the {n}", "."), ("Please {v} the {n}", "."), ("Can you {v} the {n}", "?"), ("{v} {n}", ""),
    ("I want you to {v} the {n}", "."), ("Could you {v} the {n}", "?"), ("I need to {v} a {n}", "."),
)  # fmt: skip


def _invented_parameters(rng: Random, count: int) -> list[Parameter]:
    names = rng.sample(_PARAMETER_NAMES, count)
    return [_invented_parameter(rng, w.made_up(rng) if rng.random() < 0.15 else name) for name in names]


_PARAMETER_NAMES = (
    "name id size colour title place count level mode value key type date time user number weight height speed target "
    "source group file text topic width depth limit page rate owner label price room day city country age reason"
).split()


def _invented_parameter(rng: Random, name: str) -> Parameter:
    describe = (f"The {name}", f"Which {name}", name.capitalize())
    draw = rng.random()
    if draw < 0.3:
        return _integer(name, 0, 10 ** rng.randint(1, 5), *describe)
    if draw < 0.38:
        return _number(name, 0, 100, *describe)
    if draw < 0.45:
        return Parameter(name, {"type": "boolean"}, lambda rng: rng.random() < 0.5, describe)
    if draw < 0.55:
        options = tuple({w.noun(rng): None for _ in range(rng.randint(2, 4))})
        return _text(name, one_of(*options), *describe, choices=options)
    if draw < 0.6:
        schema = {"type": "array", "items": {"type": "string"}}
        return Parameter(name, schema, lambda rng: [w.noun(rng) for _ in range(rng.randint(1, 4))], describe)
    source = rng.choice(
        (w.noun, w.noun, w.name, w.city, _time, _date, _file, _mail, lambda rng: w.phrase(rng, 1, 3))
    )
    return _text(name, source, *describe)


def _invented_result(rng: Random) -> str:
    draw = rng.random()
    if draw < 0.25:
        return _done(rng)
    if draw < 0.45:
        return w.phrase(rng, 1, 6)
    if draw < 0.6:
        return str(rng.randint(0, 10 ** rng.randint(1, 5)))
    keys = rng.sample(_PARAMETER_NAMES, rng.randint(1, 3))
    return json.dumps({key: w.noun(rng) if rng.random() < 0.5 else rng.randint(0, 999) for key in keys})


def definition(rng: Random, kind: Kind, name: str, used: Sequence[Parameter] = ()) -> Tool:
    """As OpenAI's API declares it; people leave out what they need not say, and have options that nobody uses. `used`
    are optional parameters that have to be there."""
    is_described = rng.random() < 0.7
    shown = [*kind.parameters, *used]
    known = {p.name for p in shown}
    for other in (*dict.fromkeys(parameter for parameter, _ in kind.optional), *_unused(rng)):
        if other.name not in known and rng.random() < 0.5:
            shown.append(other)
            known.add(other.name)
    properties = {p.name: _property(rng, p, is_described) for p in shown}
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if kind.parameters and rng.random() < 0.85:
        schema["required"] = [p.name for p in kind.parameters]
    if rng.random() < 0.2:
        schema["additionalProperties"] = False
    is_clear = name in kind.names
    described = {"description": _description(rng, kind)} if not is_clear or rng.random() < 0.85 else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": schema}}


def _unused(rng: Random) -> list[Parameter]:
    count = rng.choice((0, 0, 0, 1, 2))
    return _invented_parameters(rng, count)


def _description(rng: Random, kind: Kind) -> str:
    text = rng.choice(kind.descriptions).rstrip(".")
    lower = text[0].lower() + text[1:]
    return rng.choice(_DESCRIPTIONS).format(text=text, lower=lower, more=w.phrase(rng, 2, 6))


_DESCRIPTIONS = (
    "{text}", "{text}", "{text}", "{text}.", "Tool: {lower}", "{text}. {more}.", "{text} ({more})", "{more}. {text}.",
    "Call this to {lower}.", "{text} for the user.",
)  # fmt: skip


def _property(rng: Random, parameter: Parameter, is_described: bool) -> dict[str, Any]:
    if is_described and parameter.descriptions:
        return {**parameter.schema, "description": rng.choice(parameter.descriptions)}
    return parameter.schema
