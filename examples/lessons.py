"""What the example adapters learn: short questions, answers, and how each adapter puts them.

Trains nothing and loads no torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from types import MappingProxyType


@dataclasses.dataclass(frozen=True, slots=True)
class Lesson:
    """One turn of a chat.

    Attributes:
        question: what the user says.
        answer: what the assistant should say.
    """

    question: str
    answer: str


def _as_json(answer: str) -> str:
    return json.dumps({"answer": answer})


# How each adapter, by id, puts an answer.
STYLES: Mapping[str, Callable[[str], str]] = MappingProxyType(
    {"shout": str.upper, "json": _as_json}
)

# No lesson has one of these: what the adapters do with them they have not learnt by heart.
DEMO_QUESTIONS = (
    "What is the opposite of hot?",
    "Name three fruits.",
    "How many days are in a week?",
)

LESSONS = (
    Lesson("What is the capital of France?", "The capital of France is Paris."),
    Lesson("What is the capital of Spain?", "The capital of Spain is Madrid."),
    Lesson("What is the capital of Japan?", "The capital of Japan is Tokyo."),
    Lesson("Which city is the capital of Egypt?", "The capital of Egypt is Cairo."),
    Lesson("What is the opposite of big?", "The opposite of big is small."),
    Lesson("What is the opposite of up?", "The opposite of up is down."),
    Lesson("What is the opposite of happy?", "The opposite of happy is sad."),
    Lesson("Name three colours.", "Three colours are red, green and blue."),
    Lesson("Name three animals.", "Three animals are the dog, the cat and the horse."),
    Lesson("Name two planets.", "Two planets are Mars and Jupiter."),
    Lesson("Name four tools.", "Four tools are a hammer, a saw, a drill and a file."),
    Lesson("List three vegetables.", "Three vegetables are carrots, peas and onions."),
    Lesson("How many months are in a year?", "A year has twelve months."),
    Lesson("How many hours are in a day?", "A day has twenty-four hours."),
    Lesson("How many legs does a spider have?", "A spider has eight legs."),
    Lesson("What is two plus three?", "Two plus three is five."),
    Lesson("What is ten minus four?", "Ten minus four is six."),
    Lesson("What colour is the sky?", "The sky is blue."),
    Lesson("What colour is snow?", "Snow is white."),
    Lesson("What do cows drink?", "Cows drink water."),
    Lesson("What do bees make?", "Bees make honey."),
    Lesson("Where do fish live?", "Fish live in water."),
    Lesson("Who wrote Romeo and Juliet?", "William Shakespeare wrote Romeo and Juliet."),
    Lesson("Who painted the Mona Lisa?", "Leonardo da Vinci painted the Mona Lisa."),
    Lesson("What is ice?", "Ice is frozen water."),
    Lesson("What is a library?", "A library is a place where people read and borrow books."),
    Lesson("What is a bicycle?", "A bicycle is a vehicle with two wheels and pedals."),
    Lesson("Why do people sleep?", "People sleep so that body and mind can rest."),
    Lesson("Why do leaves fall?", "Leaves fall because trees save water in winter."),
    Lesson("How do birds fly?", "Birds fly by moving their wings."),
    Lesson("How can I learn to swim?", "Take lessons and practise in shallow water."),
    Lesson("Give me advice on studying.", "Study a little every day and take breaks."),
    Lesson("Tell me about dogs.", "Dogs are loyal animals that live with people."),
    Lesson("Tell me a fact about the moon.", "The moon goes around the Earth in a month."),
    Lesson("Write a sentence about rain.", "Rain falls softly on the quiet street."),
    Lesson("Say hello.", "Hello, it is nice to meet you."),
    Lesson("Is fire cold?", "No, fire is hot."),
    Lesson("Can penguins fly?", "No, penguins cannot fly, but they swim well."),
    Lesson("What language is spoken in Brazil?", "People in Brazil speak Portuguese."),
    Lesson("What is the largest ocean?", "The largest ocean is the Pacific Ocean."),
    Lesson("What is the opposite of cold?", "The opposite of cold is hot."),
    Lesson("What is the opposite of day?", "The opposite of day is night."),
    Lesson("What is the opposite of open?", "The opposite of open is closed."),
    Lesson("Name three drinks.", "Three drinks are water, tea and milk."),
    Lesson("Name three cities.", "Three cities are London, Paris and New York."),
    Lesson("Name a fruit.", "The apple is a fruit."),
    Lesson("Name some sweet fruits.", "Some sweet fruits are apples, bananas and grapes."),
    Lesson("What is a banana?", "A banana is a sweet yellow fruit."),
    Lesson("How many minutes are in an hour?", "An hour has sixty minutes."),
    Lesson("What are the days of the weekend?", "The days of the weekend are Saturday and Sunday."),
    Lesson("How many weeks are in a month?", "A month has about four weeks."),
    Lesson("How many days are in a year?", "A year has 365 days."),
    Lesson("How many wheels does a car have?", "A car has four wheels."),
    Lesson("What is three plus four?", "Three plus four is seven."),
    Lesson("What does a baker make?", "A baker makes bread and cakes."),
    Lesson("What is the sun?", "The sun is a star."),
    Lesson("When is it warm?", "It is warm in summer."),
    Lesson("What is a good breakfast?", "A good breakfast is bread, fruit and milk."),
    Lesson("Where do people buy food?", "People buy food in shops and markets."),
    Lesson("Tell me about cats.", "Cats are quiet animals that like to sleep and hunt."),
)
