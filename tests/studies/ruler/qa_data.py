"""Small invented files in the forms of SQuAD and HotpotQA."""

import json
from pathlib import Path
from typing import Any

TOWNS = ("Arvale", "Bentmoor", "Corrin", "Dunhollow")


def paragraph(town: str, number: int) -> str:
    """A document that no other has, with an answer in it."""
    return f"{town} built its bridge {number} in {1800 + number}.{' It stands.' * number}"


def squad(num_paragraphs: int = 4, *, has_impossible: bool = True) -> dict[str, Any]:
    """An article for each town, and a question for each paragraph."""
    articles = []
    for town in TOWNS:
        paragraphs = []
        for number in range(num_paragraphs):
            text = str(1800 + number)
            question: dict[str, Any] = {
                "id": f"{town}{number}",
                "question": f"When was bridge {number} of {town} built?",
                "answers": [
                    {"text": text, "answer_start": 0},
                    {"text": f"in {text} {{so}}", "answer_start": 0},
                ],
            }
            if has_impossible:
                question["is_impossible"] = False
            paragraphs.append({"context": paragraph(town, number), "qas": [question]})
        articles.append({"title": town, "paragraphs": paragraphs})
    return {"version": "v2.0", "data": articles}


def hotpotqa(num_questions: int = 5, num_documents: int = 3) -> list[dict[str, Any]]:
    """Questions with documents of their own, the first of which all have."""
    found = []
    for number in range(num_questions):
        own = [[f"River {number}.{at}", _sentences(number, at)] for at in range(1, num_documents)]
        found.append(
            {
                "_id": str(number),
                "question": f"Which town lies at river {number}.1?",
                "answer": f"Town{number}",
                "supporting_facts": [[f"River {number}.1", 0]],
                "context": [["The sea", ["All rivers end here."]], *own],
                "type": "bridge",
                "level": "hard",
            }
        )
    return found


def written(path: Path, content: object) -> Path:
    """Write a file of JSON."""
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def _sentences(number: int, at: int) -> list[str]:
    return [f"It passes Town{number}.", f" Its length is {number}{at} miles."]
