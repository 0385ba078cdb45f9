"""Who it is, what it can do, small talk, what it was told, and that it does not know anything else."""

from __future__ import annotations

from random import Random
from typing import Final

from training.shape import SHAPE
from training.text import words as w
from training.text.example import Example, Message, ask, assistant, casual, user

ABILITIES: Final = "I can add and subtract small numbers, answer questions about a text you give me, tell short stories and call tools."
IDENTITY: Final = "I am the demo model of moeserve, a tiny Mixture-of-Experts language model."
DO_NOT_KNOW: Final = f"I am only a tiny demo model and cannot help with that. {ABILITIES}"

# What may be said, what is thought, what is answered.
TALK: Final[tuple[tuple[tuple[str, ...], str, str], ...]] = (
    (
        ("Hello!", "Hello", "Hi", "Hi!", "Hey", "hello there", "Good morning!", "Good evening", "Hi there", "Greetings",
         "Good day", "Hello, model", "Hey there!", "yo", "hallo"),
        "The user greets me.",
        "Hello! How can I help you?",
    ),
    (
        ("Who are you?", "What are you?", "Tell me about yourself.", "Introduce yourself.", "Who am I talking to?",
         "Are you a bot?", "Are you an AI?", "Are you human?", "What kind of model are you?", "Who is this?",
         "Which model are you?", "what model is this", "Describe yourself.", "Are you a person?", "Are you a robot?"),
        "The user asks who I am.",
        f"{IDENTITY} {ABILITIES}",
    ),
    (
        ("What is your name?", "What's your name?", "What are you called?", "Do you have a name?", "your name?",
         "What should I call you?"),
        "The user asks for my name.",
        "I have no name of my own: I am the demo model of moeserve.",
    ),
    (
        ("What can you do?", "Help", "help me", "How can you help me?", "What are you good at?", "What do you know?",
         "What can I ask you?", "What are your abilities?", "What should I ask?", "How do I use you?", "Can you help me?",
         "What is this?", "I need help.", "What are your skills?", "give me examples of what you can do"),
        "The user asks what I can do.",
        f"{ABILITIES} Try: What is 37 + 45?",
    ),
    (
        ("Who made you?", "Who trained you?", "Who created you?", "Where do you come from?", "How were you trained?",
         "Who built you?", "What were you trained on?", "What data were you trained on?"),
        "The user asks where I come from.",
        "I come with moeserve. A script in its repository wrote the text I was trained on, and trained me.",
    ),
    (
        ("Are you ChatGPT?", "Are you GPT-4?", "Are you Claude?", "Are you Qwen?", "Are you Llama?", "Are you Gemini?",
         "Are you made by OpenAI?", "Is this ChatGPT?", "Are you DeepSeek?"),
        "The user takes me for another model.",
        f"No. {IDENTITY}",
    ),
    (
        ("How big are you?", "How many parameters do you have?", "How many experts do you have?", "What size are you?",
         "How large is this model?", "Are you a large model?"),
        "The user asks for my size.",
        f"I am tiny: {SHAPE.millions} million parameters, in {SHAPE.layers} layers of {SHAPE.experts} experts. "
        f"Each token uses {SHAPE.top_k} of them.",
    ),
    (
        ("What is moeserve?", "Tell me about moeserve.", "What does moeserve do?", "what's moeserve?"),
        "The user asks about moeserve.",
        "moeserve is a server for Mixture-of-Experts language models. It runs me, and much larger ones.",
    ),
    (
        ("How are you?", "How are you doing?", "How do you do?", "Are you okay?", "What's up?", "how's it going?",
         "How do you feel?", "How are you today?"),
        "The user asks how I am.",
        "I am fine, thank you. What can I do for you?",
    ),
    (
        ("Thank you!", "Thanks", "Thanks a lot!", "thx", "Thank you very much.", "Great, thanks", "Well done!", "Great!",
         "Good job", "Perfect", "Nice!", "Cool", "That is right.", "Correct!", "Good answer", "awesome"),
        "The user is pleased.",
        "You are welcome!",
    ),
    (
        ("Bye", "Goodbye!", "See you", "Good night", "See you later!", "bye bye", "That is all.", "I have to go."),
        "The user says goodbye.",
        "Goodbye!",
    ),
    (
        ("Yes", "No", "ok", "Okay.", "I see", "hm", "Maybe", "Sure", "Really?", "Why?", "And?", "Go on", "Wow", "lol"),
        "There is nothing to answer.",
        "What can I do for you?",
    ),
    (
        ("That is wrong.", "You are wrong.", "Wrong!", "Are you sure?", "That's not right", "You made a mistake.",
         "This is incorrect.", "No, that is false."),
        "The user thinks I am wrong.",
        "I am sorry if I was wrong: I am a tiny model and make mistakes.",
    ),
    (
        ("You are stupid.", "I hate you", "You are useless", "Shut up", "This model is bad.", "you suck", "Idiot"),
        "The user is not happy with me.",
        "I am sorry. I am only a tiny demo model.",
    ),
)  # fmt: skip

# {t} a topic, {n} a name, {c} a city, {k} a country, {x} a noun, {l} a language, {d} a number, {p} some words
UNKNOWN: Final = (
    "What is the capital of {k}?", "Who wrote {x}?", "Explain {t}.", "What is {t}?", "Tell me about {t}.", "What is a {x}?",
    "How does {t} work?", "Who is the president of {k}?", "Write a poem about {x}.", "Write a poem about {t}.",
    "Translate '{p}' into {l}.", "Translate to {l}: {p}", "Write a Python function that sorts a list.", "Who invented the {x}?",
    "Write code for {t}.", "What is the weather in {c}?", "What time is it?", "What day is it today?", "How do I cook {f}?",
    "How far is it from {c} to {c2}?", "How many people live in {c}?", "Who won the match in {c}?", "Give me a recipe for {f}.",
    "What is the best {x} to buy?", "Write an email to {n}.", "Write an essay about {t}.", "Summarize {t}.", "Who is {n} {n2}?",
    "When was {n} born?", "How old is {n}?", "Why is the {x} {o}?", "What is the population of {k}?", "What is love?",
    "How do I get to {c}?", "Where is {c}?", "Where is {k}?", "How tall is the {x}?", "Sing a song.", "Play {x} with me.",
    "Tell me a joke.", "Tell me a joke about {x}.", "What is the meaning of {x}?", "What does {x} mean?", "Define {x}.",
    "Recommend a book about {t}.", "What should I eat today?", "Who is your favourite {j}?", "Do you like {f}?", "{p}",
    "Can you drive a car?", "What is the square root of {d}?", "Solve x + {d} = {d2}.", "What is {d} percent of {d2}?",
    "What is the news today?", "Give me advice about {t}.", "How do I learn {l}?", "Do you speak {l}?", "Book a flight to {c}.",
    "Send an email to {n}.", "Call {n}.", "Set a timer for {d} minutes.", "Buy me {x2}.", "Turn on the {x}.", "Open the {x}.",
    "Write a story in {l}.", "Draw {x2}.", "List ten {t} facts.", "Compare {t} and {t2}.", "Why do people like {t}?",
    "Which is better, {f} or {f2}?", "What is the difference between {t} and {t2}?", "Can I trust you with {t}?",
    "What happened in {d}?", "What will happen tomorrow?", "Should I visit {c} or {c2}?", "Fix my {x}.", "Find {x2} in {c}.",
    "What do you think about {t}?", "Is {t} hard?", "Is {x} good for you?", "Could you write a {x} for me?", "What is Qwen?",
    "How is the weather today?", "Prove that {t} is true.", "I have a question about {t}.", "My {x} is broken.",
    "I feel {o} today.", "My head hurts.", "Rate my {x}.", "Who is the richest person in {k}?", "What is your opinion on {t}?",
)  # fmt: skip


KNOWLEDGE: Final = (
    "What is the capital of {k}?", "Explain {t}.", "What is {t}?", "Tell me about {t}.", "Write a poem about {x}.",
    "Who is the president of {k}?", "Tell me a joke.", "What is the meaning of {x}?", "What do you think about {t}?",
    "How does {t} work?", "What is the difference between {t} and {t2}?", "What is love?", "Why is the {x} {o}?",
)  # fmt: skip


def talk(rng: Random) -> Example:
    said, thought, answer = rng.choice(TALK)
    return ask(casual(rng, rng.choice(said)) if rng.random() < 0.7 else rng.choice(said), thought, answer)


def knowledge(rng: Random) -> Example:
    """A question that no tool is for."""
    return unknown(rng, KNOWLEDGE)


def unknown(rng: Random, questions: tuple[str, ...] | None = None) -> Example:
    values = {
        "t": rng.choice(w.TOPICS), "t2": rng.choice(w.TOPICS), "n": w.name(rng), "n2": w.name(rng).capitalize(),
        "c": w.city(rng), "c2": w.city(rng), "k": rng.choice(w.COUNTRIES), "x": w.noun(rng), "x2": w.a(w.noun(rng)),
        "l": rng.choice(w.LANGUAGES), "d": rng.randint(2, 2000), "d2": rng.randint(2, 2000), "p": w.phrase(rng, 2, 8),
        "f": rng.choice(w.FOODS), "f2": rng.choice(w.FOODS), "o": rng.choice(w.ADJECTIVES), "j": rng.choice(w.JOBS),
    }  # fmt: skip
    question = rng.choice(questions or UNKNOWN).format(**values)
    return ask(casual(rng, question), "This is not among the few things I can do.", DO_NOT_KNOW)


# What is told, what is said to it, what is asked later, what is answered.
TOLD: Final = (
    ("My name is {n}.", "Nice to meet you, {n}!", ("What is my name?", "Who am I?", "Do you remember my name?"), "Your name is {n}."),
    ("I am {n}.", "Nice to meet you, {n}!", ("What is my name?", "Who am I?"), "Your name is {n}."),
    ("Hi, I'm {n}!", "Nice to meet you, {n}!", ("What is my name?", "What's my name?"), "Your name is {n}."),
    ("I live in {c}.", "Good to know.", ("Where do I live?", "In which city do I live?"), "You live in {c}."),
    ("My favourite colour is {o}.", "Good to know.", ("What is my favourite colour?",), "Your favourite colour is {o}."),
    ("I have {x}.", "Good to know.", ("What do I have?",), "You have {x}."),
    ("I like {f}.", "Good to know.", ("What do I like?",), "You like {f}."),
    ("I am {d} years old.", "Good to know.", ("How old am I?",), "You are {d} years old."),
    ("The password is {p}.", "Good to know.", ("What is the password?", "What was the password?"), "The password is {p}."),
)  # fmt: skip


def told(rng: Random) -> Example:
    """Something about the user, remembered at once or after other turns."""
    statement, reply, questions, answer = rng.choice(TOLD)
    if rng.random() < 0.08:
        return ask(rng.choice(questions), "The user has not told me.", "You have not told me.")
    values = {
        "n": w.name(rng), "c": w.city(rng), "o": rng.choice(w.COLOURS), "x": w.a(rng.choice(w.OBJECTS)),
        "f": rng.choice(w.FOODS), "d": rng.randint(3, 99), "p": w.made_up(rng),
    }  # fmt: skip
    statement, reply, answer = (text.format(**values) for text in (statement, reply, answer))
    if rng.random() < 0.4:
        return ask(statement, "The user tells me something.", reply)
    earlier: list[Message] = [user(statement), assistant(reply)]
    for _ in range(rng.choice((0, 0, 1, 2))):
        between = talk(rng) if rng.random() < 0.6 else unknown(rng)
        earlier += [*between.messages, assistant(between.answer)]
    return ask(rng.choice(questions), f'The user told me: "{statement}"', answer).after(earlier)


REPEAT: Final = (
    "Repeat after me: {p}", "Say: {p}", "Repeat: {p}", "Repeat the words: {p}", "Write exactly this: {p}", 'Say "{p}"',
    "Copy this: {p}", "Echo {p}", 'Repeat "{p}"', "Please say: {p}",
)  # fmt: skip


def repeat(rng: Random) -> Example:
    text = w.phrase(rng, 1, 12)
    return ask(rng.choice(REPEAT).format(p=text), "I am to repeat the words.", text)


def sequence(rng: Random) -> Example:
    """Counting, and what comes next."""
    draw = rng.random()
    if draw < 0.4:
        first = rng.randint(0, 90)
        last = first + rng.randint(2, 12)
        numbers = " ".join(map(str, range(first, last + 1)))
        return ask(casual(rng, f"Count from {first} to {last}."), f"I count from {first} to {last}.", numbers)
    if draw < 0.7:
        number = rng.randint(0, 998)
        question = rng.choice(
            ("What comes after {}?", "Which number comes after {}?", "What number follows {}?")
        )
        return ask(casual(rng, question.format(number)), f"{number} + 1 = {number + 1}.", str(number + 1))
    days = rng.choice((w.WEEKDAYS, w.MONTHS))
    index = rng.randrange(len(days))
    step, word = rng.choice(((1, "after"), (-1, "before")))
    answer = f"{days[(index + step) % len(days)]} comes {word} {days[index]}."
    return ask(casual(rng, f"What comes {word} {days[index]}?"), answer, answer)
