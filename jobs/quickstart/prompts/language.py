"""Words and their forms, facts, activities and code."""

# ruff: noqa: E501 (example sentences stay on one line)

import itertools

from jobs.quickstart.prompts import words as w
from jobs.quickstart.prompts.prompt import DRAWS, Kinds, a, cross, plural

kind = Kinds()


@kind(
    1100,
    ('What does the word "eager" mean?', "Eager means wanting very much to do or have something."),
    ('Define the word "orchard".', "An orchard is a piece of land where fruit trees grow."),
    ('What does "hesitate" mean?', "To hesitate means to wait a moment before you act."),
    ('Give me a simple definition of "gratitude".', "Gratitude is the feeling of being thankful."),
)
def meanings(rng):
    forms = [
        'What does the word "{x}" mean?',
        'Define the word "{x}".',
        'Explain the word "{x}" to a child.',
        'What is the meaning of "{x}"?',
        'Give me a simple definition of "{x}".',
        'What does "{x}" mean?',
    ]
    return cross(forms, x=w.WORDS)


@kind(
    400,
    ("What is the opposite of tight?", "The opposite of tight is loose."),
    ("Give me the opposite of heavy.", "The opposite of heavy is light."),
)
def opposites(rng):
    for x, y in [*w.OPPOSITES.items(), *((y, x) for x, y in w.OPPOSITES.items())]:
        for form in [
            "What is the opposite of {}?",
            "Give me the opposite of {}.",
            "What word means the opposite of {}?",
            "Name the opposite of {}.",
        ]:
            yield {"text": form.format(x), "must": (y,)}


@kind(
    300,
    ("What is the capital of Jordan?", "The capital of Jordan is Amman."),
    ("Name the capital of Nepal.", "The capital of Nepal is Kathmandu."),
)
def capitals(rng):
    for x, y in w.CAPITALS.items():
        for form in [
            "What is the capital of {}?",
            "Name the capital of {}.",
            "Which city is the capital of {}?",
            "Tell me the capital city of {}.",
            "Do you know the capital of {}?",
        ]:
            yield {"text": form.format(x), "must": (y,)}


@kind(150, ("What color is a ripe plum?", "A ripe plum is purple."), ("What color is sand?", "Sand is light brown."))
def colors(rng):
    for x, y in w.COLORS.items():
        for form in ["What color is {}?", "Tell me the color of {}.", "Which color does {} have?", "What is the color of {}?"]:
            yield {"text": form.format(x), "must": (y,)}


@kind(
    1500,
    ("Put this sentence in the past tense: Karl waters the garden.", "Karl watered the garden."),
    ("Put this sentence in the past tense: Olga eats an apple.", "Olga ate an apple."),
    ("Put this sentence in the past tense: Olga writes a card.", "Olga wrote a card."),
)
def past(rng):
    forms = ["Put this sentence in the past tense: {}", "Change this to the past tense: {}", "Write this sentence in the past tense: {}"]
    for _, third, past, objects in w.VERBS:
        for n, o, form in itertools.product(w.NAMES, objects, forms):
            yield {"text": form.format(f"{n} {third} {o}."), "exact": f"{n} {past} {o}."}


@kind(
    1500,
    ("Put this sentence in the future tense: Karl waters the garden.", "Karl will water the garden."),
    ("Put this sentence in the future tense: Olga eats an apple.", "Olga will eat an apple."),
    ("Put this sentence in the future tense: Olga writes a card.", "Olga will write a card."),
)
def future(rng):
    forms = ["Put this sentence in the future tense: {}", "Change this to the future tense: {}"]
    for base, third, _, objects in w.VERBS:
        for n, o, form in itertools.product(w.NAMES, objects, forms):
            yield {"text": form.format(f"{n} {third} {o}."), "exact": f"{n} will {base} {o}."}


@kind(
    1500,
    ("Make this sentence negative: Karl waters the garden.", "Karl does not water the garden."),
    ("Make this sentence negative: Olga eats an apple.", "Olga does not eat an apple."),
    ("Make this sentence negative: Hugo writes a card.", "Hugo does not write a card."),
)
def negative(rng):
    forms = ["Make this sentence negative: {}", "Turn this into a negative sentence: {}"]
    for base, third, _, objects in w.VERBS:
        for n, o, form in itertools.product(w.NAMES, objects, forms):
            yield {"text": form.format(f"{n} {third} {o}."), "exact": f"{n} does not {base} {o}."}


@kind(
    1500,
    ("Turn this sentence into a question: Karl waters the garden.", "Does Karl water the garden?"),
    ("Turn this sentence into a question: Olga eats an apple.", "Does Olga eat an apple?"),
    ("Turn this sentence into a question: Hugo writes a card.", "Does Hugo write a card?"),
)
def questions(rng):
    forms = ["Turn this sentence into a question: {}", "Make a question from this sentence: {}"]
    for base, third, _, objects in w.VERBS:
        for n, o, form in itertools.product(w.NAMES, objects, forms):
            yield {"text": form.format(f"{n} {third} {o}."), "exact": f"Does {n} {base} {o}?"}


@kind(
    150,
    ("Say this politely: Clean the oven.", "Could you please clean the oven?"),
    ("Make this more polite: Give me the keys.", "Could you please give me the keys?"),
)
def polite(rng):
    return cross(
        [
            "Say this politely: {t}",
            "Make this more polite: {t}",
            "Rewrite this in a polite way: {t}",
            "How can I say this politely? {t}",
            "Turn this into a polite request: {t}",
        ],
        t=w.REQUESTS,
    )


@kind(
    2400,
    ("What is the difference between a plum and a cherry?", "A plum is large and soft, while a cherry is small and round."),
    ("What is the difference between a rug and a mat?", "A rug covers a large part of a floor, while a mat lies by the door."),
    ("How is a miner different from a clown?", "A miner works under the ground, while a clown makes people laugh."),
    ("Compare a worm and a robin in one sentence.", "A worm lives in the soil, while a robin is a bird that can fly."),
)
def differences(rng):
    groups = [w.ANIMALS, w.THINGS, w.PLACES, w.JOBS]
    forms = ["What is the difference between {} and {}?", "How is {} different from {}?", "Compare {} and {} in one sentence."]
    for _ in range(DRAWS):
        group = rng.choice(groups)
        i = rng.randrange(len(group) - 3)  # neighbours in the lists have something to do with each other
        yield {"text": rng.choice(forms).format(a(group[i]), a(group[i + rng.randint(1, 3)]))}


@kind(
    1500,
    ("Is a rug an animal or a thing?", "A rug is a thing."),
    ("Is a worm an animal or a place?", "A worm is an animal."),
    ("Is a miner a job or a thing?", "A miner is a job."),
    ("Is a valley a place or an animal?", "A valley is a place."),
)
def sorting(rng):
    groups = {"an animal": w.ANIMALS, "a thing": w.THINGS, "a place": w.PLACES, "a job": w.JOBS}
    for right, wrong in itertools.permutations(groups, 2):
        for x in groups[right]:
            first, second = rng.sample([right, wrong], 2)
            yield {"text": f"Is {a(x)} {first} or {second}?", "must": (right,), "exact": f"{a(x).capitalize()} is {right}."}


@kind(
    300,
    ("What is the plural of rug?", "The plural of rug is rugs."),
    ("What is the plural of story?", "The plural of story is stories."),
    ("What is the plural of bush?", "The plural of bush is bushes."),
)
def plurals(rng):
    nouns = [x for x in w.ANIMALS + w.THINGS + w.JOBS + w.PLACES if " " not in x and x not in ("scissors", "soap", "glue")]
    for x in nouns:
        for form in ["What is the plural of {}?", "Give me the plural of {}."]:
            yield {"text": form.format(x), "exact": f"The plural of {x} is {plural(x)}."}


@kind(
    250,
    ("Which number comes after 41?", "The number after 41 is 42."),
    ("Which number comes before 68?", "The number before 68 is 67."),
    ("Which number comes after 99?", "The number after 99 is 100."),
)
def counting(rng):
    for x in range(2, 121):
        yield {"text": f"Which number comes after {x}?", "exact": f"The number after {x} is {x + 1}."}
        yield {"text": f"Which number comes before {x}?", "exact": f"The number before {x} is {x - 1}."}


@kind(
    600,
    ("Why do people like archery?", "People like archery because it is calm and needs a steady hand."),
    ("What do you need for fencing?", "For fencing you need a sword, a mask and a thick jacket."),
    ("Give me a reason to try karate.", "Karate makes you strong and teaches you to stay calm."),
    ("How can I get better at darts?", "You can get better at darts by throwing from the same spot every day."),
    ("What is origami?", "Origami is the art of folding paper into shapes."),
)
def activities(rng):
    forms = [
        "Why do people like {t}?",
        "What do you need for {t}?",
        "Give me a reason to try {t}.",
        "How can I get better at {t}?",
        "What is {t}?",
        "Give me a tip for {t}.",
        "What can you learn from {t}?",
        "How does {t} help you relax?",
    ]
    return cross(forms, t=w.ACTIVITIES)


@kind(
    1500,
    ("Write a Python function named triple that multiplies a number by three.", "```python\ndef triple(x):\n    return x * 3\n```"),
    ("Define a Python function half that divides a number by two.", "```python\ndef half(x):\n    return x / 2\n```"),
    (
        "In Python, write a function is_long(text) that checks whether a string has more than ten characters.",
        "```python\ndef is_long(text):\n    return len(text) > 10\n```",
    ),
    (
        "Show me a Python function called add_comma that joins two names with a comma.",
        '```python\ndef add_comma(first, second):\n    return first + ", " + second\n```',
    ),
)
def code(rng):
    forms = [
        "Write a Python function named {name} that {does}.",
        "In Python, write a function {name}({args}) that {does}.",
        "Define a Python function {name} that {does}.",
        "Show me a Python function called {name} that {does}.",
        "Write {name}({args}) in Python. It {does}.",
    ]
    for (does, name, args, example, result), form in itertools.product(w.CODE, forms):
        for alias in (name, f"get_{name}", f"my_{name}", f"{name}_value", f"do_{name}"):
            yield {"text": form.format(name=alias, does=does, args=args), "call": f"{alias}{example}", "result": result}
