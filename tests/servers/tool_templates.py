"""Short chat templates that write tools and calls like those of known model families."""

_TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
_ASSISTANT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
_LISTED = (
    "{%- if tools %}{{ '<tools>' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
)


def _chat_ml(call: str, end: str = "<|im_end|>\\n", *, thinks: bool = False) -> str:
    """Qwen's frame around the text of each call."""
    opening = _ASSISTANT
    if thinks:
        opening = _ASSISTANT.replace("assistant\\n'", "assistant\\n<think>\\n'")
    return (
        _LISTED + "{% for m in messages %}{% if m.tool_calls %}{{ '<|im_start|>assistant' }}"
        "{% if m.content %}{{ '\\n' + m.content }}{% endif %}"
        "{% for c in m.tool_calls %}" + call + "{% endfor %}{{ '" + end + "' }}"
        "{% else %}" + _TURN + "{% endif %}{% endfor %}" + opening
        + ("{# </think> #}" if thinks else "")
    )  # fmt: skip


HERMES_CALL = (
    '{{ \'\\n<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}"
)
HERMES = _chat_ml(HERMES_CALL)
THINKING = _chat_ml(HERMES_CALL, thinks=True)
# Arguments come before the name, as in NousResearch's template.
HERMES_ARGUMENTS_FIRST = _chat_ml(
    "{{ '\\n<tool_call>\\n{ \"arguments\": ' }}{{ c.function.arguments | tojson }}"
    "{{ ', \"name\": \"' + c.function.name + '\"}\\n</tool_call>' }}"
)
QWEN3_CODER = _chat_ml(
    "{{ '\\n<tool_call>\\n<function=' + c.function.name + '>\\n' }}"
    "{% for k, v in c.function.arguments | items %}"
    "{{ '<parameter=' + k + '>\\n' }}{{ v if v is string else v | tojson }}"
    "{{ '\\n</parameter>\\n' }}{% endfor %}{{ '</function>\\n</tool_call>' }}"
)
_MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools %}{{ '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}{% endif %}"
    "{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.tool_calls %}CALLS{{ '</s>' }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    "{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"
)
# The ids must have nine characters, as in Mistral's own templates.
MISTRAL = _MISTRAL.replace(
    "CALLS",
    "{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    '{{ \'{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments | tojson }}{{ ', \"id\": \"' + c.id + '\"}' }}"
    "{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' }}",
)
MISTRAL_NAMED = _MISTRAL.replace(
    "CALLS",
    "{% for c in m.tool_calls %}{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' }}"
    "{{ c.function.arguments | tojson }}{% endfor %}",
)
LLAMA = (
    "{% if tools %}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ '<|header|>' + m.role + '\\n\\n' }}{% if m.tool_calls %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    '{% set f = m.tool_calls[0].function %}{{ \'{"name": "\' + f.name + \'", "parameters": \' }}'
    "{{ f.arguments | tojson }}{{ '}' }}{% else %}{{ m.content | trim }}{% endif %}"
    "{{ '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant\\n\\n' }}{% endif %}"
)
PYTHONIC = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ '<|header|>' + m.role + '\\n\\n' + m.content }}{% if m.tool_calls %}"
    "{{ '[' }}{% for c in m.tool_calls %}{{ c.function.name + '(' }}"
    "{% for k, v in c.function.arguments | items %}{{ k + '=' }}{{ v | tojson }}"
    "{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ')' }}"
    "{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' }}{% endif %}"
    "{{ '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant\\n\\n' }}{% endif %}"
)
# A form that no table has: the name, a fence, JSON.
FENCED = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<A>' }}"
    "{% if m.tool_calls %}{{ '<calls>' }}{% for c in m.tool_calls %}"
    "{{ '<call>function<sep>' + c.function.name + '\\n```json\\n' }}"
    "{{ c.function.arguments | tojson }}{{ '\\n```</call>' }}{% endfor %}{{ '</calls>' }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<A>' }}{% endif %}"
)
NO_TOOLS = "{% for m in messages %}" + _TURN + "{% endfor %}" + _ASSISTANT
# Turns must alternate, and there is no system message.
STRICT_TURNS = (
    "{% for m in messages %}"
    "{% if m.role != ('user' if loop.index0 is even else 'assistant') %}"
    "{{ raise_exception('turns must alternate') }}{% endif %}" + _TURN + "{% endfor %}" + _ASSISTANT
)
# name -> (template, the format that is found in it)
TOOL_TEMPLATES = {
    "hermes": (HERMES, "hermes"),
    "thinking": (THINKING, "hermes"),
    "arguments first": (HERMES_ARGUMENTS_FIRST, "hermes"),
    "qwen3-coder": (QWEN3_CODER, "qwen3-coder"),
    "mistral": (MISTRAL, "mistral"),
    "mistral, named": (MISTRAL_NAMED, "template"),
    "llama": (LLAMA, "llama-json"),
    "pythonic": (PYTHONIC, "pythonic"),
    "fenced": (FENCED, "template"),
    "no tools": (NO_TOOLS, "generic"),
    "strict turns": (STRICT_TURNS, "generic"),
}
