"""Sums told as stories."""

# ruff: noqa: E501 (example sentences stay on one line)

from jobs.quickstart.prompts import words as w
from jobs.quickstart.prompts.prompt import DRAWS, Kinds, a, plural

kind = Kinds()


@kind(
    2200,
    (
        "Rosa has 6 shells and finds 3 more. How many shells does Rosa have now?",
        "Rosa starts with 6 shells and finds 3 more. 6 + 3 = 9, so Rosa has 9 shells now.",
    ),
    (
        "Paul picked 12 pears in the morning and 5 in the afternoon. How many pears did Paul pick?",
        "Paul picked 12 pears and then 5 more. 12 + 5 = 17, so Paul picked 17 pears.",
    ),
)
def adding(rng):
    templates = [
        "{n} has {x} {t} and gets {y} more. How many {t} does {n} have now?",
        "{n} found {x} {t} on Monday and {y} {t} on Tuesday. How many {t} did {n} find in all?",
        "There are {x} {t} on the table. {n} puts {y} more there. How many {t} are on the table now?",
        "{n} has {x} {t} and {m} has {y} {t}. How many {t} do they have together?",
    ]
    for _ in range(DRAWS):
        n, m = rng.sample(w.NAMES, 2)
        x, y = rng.randint(2, 14), rng.randint(2, 12)
        yield {"text": rng.choice(templates).format(n=n, m=m, x=x, y=y, t=rng.choice(w.COUNTABLE)), "number": x + y}


@kind(
    2200,
    (
        "Rosa has 9 shells and gives 4 to Jane. How many shells does Rosa have left?",
        "Rosa starts with 9 shells and gives 4 away. 9 - 4 = 5, so Rosa has 5 shells left.",
    ),
    (
        "There were 15 pears in a bowl. Paul ate 2 of them. How many pears are left?",
        "There were 15 pears and Paul ate 2. 15 - 2 = 13, so 13 pears are left.",
    ),
)
def taking_away(rng):
    templates = [
        "{n} has {x} {t} and gives {y} to {m}. How many {t} does {n} have left?",
        "There were {x} {t} in a box. {n} took {y} of them. How many {t} are left in the box?",
        "{n} had {x} {t} and lost {y} of them. How many {t} does {n} have now?",
        "{n} has {x} {t}. {m} has {y} fewer. How many {t} does {m} have?",
    ]
    for _ in range(DRAWS):
        n, m = rng.sample(w.NAMES, 2)
        x = rng.randint(4, 18)
        y = rng.randint(1, x - 1)
        yield {"text": rng.choice(templates).format(n=n, m=m, x=x, y=y, t=rng.choice(w.COUNTABLE)), "number": x - y}


@kind(
    2000,
    (
        "There are 3 bowls with 4 pears in each. How many pears are there in all?",
        "There are 3 bowls with 4 pears in each. 3 x 4 = 12, so there are 12 pears in all.",
    ),
    (
        "Rosa reads 5 pages every day. How many pages does Rosa read in 6 days?",
        "Rosa reads 5 pages a day for 6 days. 5 x 6 = 30, so Rosa reads 30 pages.",
    ),
)
def times(rng):
    for _ in range(DRAWS):
        n, x, y = rng.choice(w.NAMES), rng.randint(2, 10), rng.randint(2, 10)
        t, c = rng.choice(w.COUNTABLE), rng.choice(w.CONTAINERS)
        template = rng.choice(
            [
                "There are {x} {c} with {y} {t} in each. How many {t} are there in all?",
                "{n} has {x} {c}. Each one holds {y} {t}. How many {t} does {n} have?",
                "{n} collects {y} {t} every day. How many {t} does {n} collect in {x} days?",
                "{n} gives {y} {t} to each of {x} friends. How many {t} does {n} give away?",
            ]
        )
        yield {"text": template.format(n=n, x=x, y=y, t=t, c=c), "number": x * y}


@kind(
    1600,
    (
        "Rosa shares 12 shells equally among 3 friends. How many shells does each friend get?",
        "Rosa shares 12 shells among 3 friends. 12 / 3 = 4, so each friend gets 4 shells.",
    ),
    (
        "Paul puts 20 pears into 4 bowls, the same number in each. How many pears are in each bowl?",
        "Paul puts 20 pears into 4 bowls. 20 / 4 = 5, so each bowl has 5 pears.",
    ),
)
def sharing(rng):
    for _ in range(DRAWS):
        n, x, y = rng.choice(w.NAMES), rng.randint(2, 10), rng.randint(2, 10)
        t, c = rng.choice(w.COUNTABLE), rng.choice(w.CONTAINERS)
        template = rng.choice(
            [
                "{n} shares {z} {t} equally among {x} friends. How many {t} does each friend get?",
                "{n} puts {z} {t} into {x} {c}, the same number in each. How many {t} are in each?",
                "{z} {t} are split equally between {x} children. How many {t} does each child get?",
            ]
        )
        yield {"text": template.format(n=n, x=x, z=x * y, t=t, c=c), "number": y}


@kind(
    1600,
    ("A rose costs 3 dollars. How much do 4 roses cost?", "Each rose costs 3 dollars. 3 x 4 = 12, so 4 roses cost 12 dollars."),
    (
        "Rosa has 20 dollars and buys a vase for 8 dollars. How much money does Rosa have left?",
        "Rosa has 20 dollars and spends 8. 20 - 8 = 12, so Rosa has 12 dollars left.",
    ),
)
def money(rng):
    for _ in range(DRAWS):
        n, t, x, y = rng.choice(w.NAMES), rng.choice(w.PRICED), rng.randint(2, 10), rng.randint(2, 10)
        if rng.random() < 0.5:
            yield {"text": f"{a(t).capitalize()} costs {x} dollars. How much do {y} {plural(t)} cost?", "number": x * y}
        else:
            have = rng.choice([8, 10, 12, 14, 15, 18, 20])
            cost = rng.randint(2, have - 1)
            yield {
                "text": f"{n} has {have} dollars and buys {a(t)} for {cost} dollars. How much money does {n} have left?",
                "number": have - cost,
            }


@kind(1500, ("What is 6 + 3?", "6 + 3 = 9."), ("What is 14 - 5?", "14 - 5 = 9."), ("Calculate 7 x 4.", "7 x 4 = 28."))
def sums(rng):
    for _ in range(DRAWS):
        sign = rng.choice("+-x")
        x, y = (rng.randint(2, 12), rng.randint(2, 10)) if sign == "x" else (rng.randint(2, 40), rng.randint(2, 20))
        if sign == "-" and x < y:
            x, y = y, x
        result = {"+": x + y, "-": x - y, "x": x * y}[sign]
        yield {"text": rng.choice(["What is {}?", "Calculate {}.", "How much is {}?"]).format(f"{x} {sign} {y}"), "number": result}
