"""The fixed texts and parameters of RULER's tasks, as data.

The sentences are RULER's (scripts/data/synthetic/constants.py and the generators beside it,
Apache 2.0). Scores are comparable only if a model reads the same sentences.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Template:
    """The prompt of a task, and what RULER allows its answer."""

    question: str  # `{context}` is the haystack
    answer_prefix: str  # the end of the prompt, which begins the answer
    answer_tokens: int  # of RULER, from FULL_LEN tokens on


FULL_LEN = 4096  # tokens: RULER's shortest context, and the first one with all its parameters

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NIAH = Template(
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What are all the special magic {kind} for {query} mentioned in the provided text?",
    " The special magic {kind} for {query} mentioned in the provided text are",
    128,
)
# RULER turns NIAH into the singular with these, in this order, if one value is the answer.
SINGULAR = (("Some", "A"), ("are all", "is"), ("are", "is"))
NUM_DEPTHS = 40  # of needles in essays: so many from 0 to 100 percent

VT = Template(
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "{context}\n"
    "Question: Find all variables that are assigned the value {query} in the text above.",
    " Answer: According to the chain(s) of variable assignment in the text above, {num_v} "
    "variables are assigned the value {query}, they are: ",
    30,
)
VT_HOPS = 4
VT_LETTERS = 5
VT_EXAMPLE_LETTERS = 3
VT_EXAMPLE_VALUE = "12345"
VT_EXAMPLE_TOKENS = 500  # at most, with the answer's budget

QA = Template(
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\nThe following are given documents.\n\n{context}\n\n"
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\nQuestion: {query}",
    " Answer:",
    32,
)
DOCUMENT = "Document {i}:\n{document}"

CWE = Template(
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?",
    " Answer: The top 10 words that appear most often in the list are:",
    120,
)
CWE_COMMON = 10


@dataclass(frozen=True, slots=True)
class Repeats:
    """How often the words of a list are repeated."""

    common: int
    others: int


# Below FULL_LEN, then from it on.
CWE_REPEATS = (Repeats(6, 1), Repeats(30, 3))
CWE_EXAMPLE_REPEATS = (Repeats(3, 1), Repeats(10, 3))
CWE_EXAMPLE_WORDS = (20, 40)

FWE = Template(
    "Read the following coded text and track the frequency of each coded word. Find the three "
    "most frequently appeared coded words. {context}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three "
    "most frequently appeared words in the above coded text?",
    " Answer: According to the coded text above, the three most frequently appeared words are:",
    50,
)
FWE_ALPHA = 2.0  # of the Zipf distribution
FWE_LETTERS = 6
FWE_TOKENS_A_WORD = 50  # of the context, for each word of the vocabulary
FWE_NOISE = "..."  # shown for the most frequent word; the next three are the answer
FWE_ANSWERS = 3
