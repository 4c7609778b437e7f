"""A text that every tokenizer should encode.

The self-check's prompts are its tokens, and the distance of int8 weights is measured with it.
"""

SAMPLE_TEXT = (
    "The old harbour lies behind a wall of grey stone. Every morning, before the ferries leave, a "
    "man with a yellow coat sweeps the steps and counts the ropes. There are forty-two of them. In "
    "1911 a storm tore all but three from their rings, and the town paid 640 crowns for new ones. "
    "def count(ropes): return sum(1 for rope in ropes if rope.is_whole). When children ask him why "
    "he counts, he says: a rope that nobody counts is soon a rope that nobody has. Then he laughs, "
    "buys bread at the corner, and walks home along the canal, past the school and the mill."
)
