"""Word lists, and words that nobody has seen before."""

from __future__ import annotations

from random import Random

NAMES = """Anna Ben Carla David Emma Felix Grace Hugo Ida Jack Kate Leo Mia Noah Olga Paul Rosa Sam Tina Viktor Alice Bob
Clara Daniel Ella Frank Gina Henry Iris James Kim Lucas Maria Nora Oscar Peter Quinn Ruth Sara Tom Uma Vera Will Yara
Zoe Adam Bella Chris Diana Eric Fiona George Hanna Ivan Julia Karl Lena Max Nina Otto Paula Ralf Sofia Theo Ursula Walter
Amir Aisha Chen Dmitri Elif Fatima Giulia Hiro Ines Jamal Kenji Layla Mateo Nadia Omar Priya Ravi Sana Tariq Yuki Mary
John Lily Mark Amy Dan Eva Finn Gus Holly Jane Ken Lucy Mike Nick Olivia Pia Rob Sue Tim Anton Ada Alan Linus Grete""".split()
# Never in the text that is learnt from.
HELD_OUT_NAMES = """Barbara Conrad Dorothea Edgar Florian Gloria Harvey Imogen Joshua Katrin Leopold Matilda Norbert Ophelia
Percy Rebecca Sebastian Tabitha Valentin Winston""".split()

ROOMS = """kitchen garden bathroom bedroom hallway cellar attic garage office library school park shop station museum hotel
hospital market bakery forest field river tower castle church bank harbour airport theatre zoo stable barn cave tent
restaurant cafe classroom lab playground stadium""".split()
CITIES = [
    *"""Paris Rome London Berlin Madrid Tokyo Oslo Vienna Prague Lisbon Dublin Athens Warsaw Helsinki Zürich München Köln
Boston Chicago Denver Seattle Miami Dallas Toronto Montreal Sydney Melbourne Delhi Mumbai Seoul Beijing Shanghai Bangkok
Cairo Lagos Nairobi Lima Bogotá Santiago Hamburg Lyon Milan Venice Naples Porto Geneva Basel Bern Stockholm Copenhagen
Amsterdam Brussels Budapest Istanbul Moscow Kyoto Osaka Singapore Jakarta Manila Hanoi Dubai Tehran Kraków Málaga""".split(),
    "New York",
    "San Francisco",
    "Los Angeles",
    "Hong Kong",
    "Mexico City",
    "São Paulo",
    "Cape Town",
    "Tel Aviv",
]
COUNTRIES = """France Italy Spain Germany Japan China India Brazil Canada Mexico Egypt Kenya Norway Sweden Finland Poland
Greece Turkey Peru Chile Australia Austria Switzerland Portugal Ireland Russia""".split()
LANGUAGES = """English French German Spanish Italian Japanese Chinese Russian Portuguese Dutch Polish Turkish Arabic Hindi
Korean Greek Swedish Latin""".split()
ANIMALS = """fox dog cat mouse bear wolf rabbit horse cow pig sheep goat duck goose hen owl crow eagle frog toad snake lion
tiger monkey elephant camel deer squirrel hedgehog turtle whale shark bee ant spider dragon unicorn parrot penguin otter
beaver badger donkey swan""".split()
COLOURS = "red blue green yellow black white brown grey pink purple orange golden silver violet".split()
OBJECTS = """ball book key hat coat cup lamp knife bag box bottle ring coin letter map clock phone pen pencil flower stone
stick rope drum flute violin guitar umbrella basket blanket pillow mirror chair table candle bell kite boat car bicycle
scarf glove shoe shirt watch camera radio ladder hammer shovel bucket broom spoon fork plate pot pan towel ticket
wallet laptop notebook backpack""".split()
FRUITS = """apples pears plums cherries oranges lemons bananas grapes melons peaches nuts carrots onions potatoes tomatoes
eggs cookies cakes sweets sandwiches stamps coins marbles books pencils flowers stickers cards shells balloons""".split()
FOODS = """pizza soup bread cheese rice pasta salad cake honey chocolate fish tea coffee milk juice ice cream pancakes
curry noodles porridge yoghurt butter jam""".replace("ice cream", "ice-cream").split()
JOBS = """teacher doctor baker farmer pilot painter singer nurse driver cook gardener lawyer writer dentist tailor
carpenter plumber fisherman soldier sailor waiter clerk judge miner smith weaver hunter shepherd librarian engineer""".split()
ADJECTIVES = """quick lazy old young big small brave shy happy sad tired hungry clever kind angry quiet loud strong weak
tall tiny fat thin rich poor wise silly funny gentle proud lonely careful""".split()
MOVES = """jumps over|runs after|looks at|sits beside|sleeps near|hides behind|waits for|walks around|flies above|barks at
follows|watches|chases|finds|helps|visits|carries|pushes|meets|feeds""".replace("\n", "|").split("|")
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = """January February March April May June July August September October November December""".split()
TOPICS = """quantum physics|football|the French Revolution|black holes|photosynthesis|the stock market|climate change
the Roman Empire|machine learning|cooking|the moon landing|chess|music theory|evolution|gravity|world history
philosophy|the internet|medicine|law|politics|movies|poetry|volcanoes|dinosaurs|electric cars|tax|religion|the brain
programming|databases|Linux|astronomy|the human body|the weather|love|the meaning of life|Shakespeare|geography
vitamins|the ocean|bitcoin|batteries|neural networks|architecture|gardening|dreams""".replace(
    "\n", "|"
).split("|")
WORDS = """water time light house world hand year head day night tree wind fire earth sound word line road door window
wall floor paper glass metal wood sand salt snow rain cloud star sun moon sea island bridge street village city train
ship plane wheel engine price money number letter question answer story song picture colour shape size weight power
speed heat cold summer winter spring autumn morning evening hour minute week month friend family child mother father
brother sister doctor teacher king queen soldier game ball race prize garden flower fruit bread meat sugar cup plate
good new old great small large long short high low early late young important different next hard easy free full""".split()

_ONSETS = (
    """b c d f g h j k l m n p r s t v w z br cr dr fl gr kl pl pr sk sl sn st tr sh ch th qu x y""".split()
)
_NUCLEI = "a e i o u a e i o u ai ea ie oo ou y".split()
_CODAS = ["", "", "", *"n r l s t m k x nd rk st ng ll p b d g ck sh".split()]


def made_up(rng: Random) -> str:
    """A lower-case word that may never have been written before: so that copying is learnt, not a list."""
    syllables = rng.choice((1, 2, 2, 2, 3))
    return "".join(rng.choice(_ONSETS) + rng.choice(_NUCLEI) + rng.choice(_CODAS) for _ in range(syllables))


def foreign(rng: Random) -> str:
    """A short word of letters from another alphabet, accents included."""
    first, last = rng.choice(
        ((0xE0, 0xFF), (0x3B1, 0x3C9), (0x430, 0x44F), (0x4E00, 0x4FFF), (0x3042, 0x3093))
    )
    return "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(2, 5)))


def name(rng: Random) -> str:
    """A first name; one in four is made up."""
    return made_up(rng).capitalize() if rng.random() < 0.25 else rng.choice(NAMES)


def names(rng: Random, count: int) -> list[str]:
    """Different ones."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[name(rng)] = None
    return list(found)


def city(rng: Random) -> str:
    return made_up(rng).capitalize() if rng.random() < 0.2 else rng.choice(CITIES)


def noun(rng: Random) -> str:
    """A common word, or one that is made up."""
    return made_up(rng) if rng.random() < 0.3 else rng.choice(rng.choice((WORDS, OBJECTS, ANIMALS)))


def phrase(rng: Random, shortest: int, longest: int) -> str:
    """Words without sense, to be copied."""
    return " ".join(_any_word(rng) for _ in range(rng.randint(shortest, longest)))


def _any_word(rng: Random) -> str:
    draw = rng.random()
    if draw < 0.2:
        return made_up(rng)
    if draw < 0.23:
        return foreign(rng)
    if draw < 0.28:
        return str(rng.randint(0, 10 ** rng.randint(1, 4)))
    word = rng.choice(rng.choice((WORDS, WORDS, OBJECTS, ANIMALS, ADJECTIVES, COLOURS, FOODS, NAMES)))
    return word.capitalize() if rng.random() < 0.1 else word


def a(noun: str) -> str:
    """With its article."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def joined(parts: list[str]) -> str:
    """a, b and c"""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
