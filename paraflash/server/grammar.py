"""Grammars of chat answers as xgrammar structural tags: tool calls in this model's format, and answers behind thinking.

The tags are plain JSON here; the engine compiles them. A required call has no opening marker because the prompt ends
with it (model.md 6.1).
"""

from __future__ import annotations

import json
from typing import Any

import deepseek_recipe as recipe

from paraflash.engine.sampling_params import StructuredOutputs

Format = dict[str, Any]


def _tagged(format_: Format) -> StructuredOutputs:
    return StructuredOutputs(structural_tag={"type": "structural_tag", "format": format_})


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _thinking() -> Format:
    return {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}


def _calls(tools: list[recipe.ToolDefinition], parallel: bool) -> Format:
    """The calls of a block, without its opening and closing lines."""
    tags = [
        {
            "type": "tag",
            "begin": f'<｜DSML｜ invoke name="{tool.name}">\n',
            "content": {
                "type": "json_schema",
                "json_schema": tool.parameters or {"type": "object"},
                "style": "deepseek_v4_1_xml",
            },
            "end": "</｜DSML｜ invoke>\n",
        }
        for tool in tools
    ]
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": "",
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def forced_calls(tools: list[recipe.ToolDefinition], parallel: bool) -> StructuredOutputs:
    """At least one call of these tools and nothing else."""
    return _tagged(_sequence(_calls(tools, parallel), {"type": "const_string", "value": "</｜DSML｜ calls>"}))


def strict_calls(tools: list[recipe.ToolDefinition], parallel: bool, thinking: bool) -> StructuredOutputs | None:
    """Free text whose block of calls, if it has one, follows the tools' schemas; None unless a tool is strict."""
    if not any(tool.strict for tool in tools):
        return None
    block = {
        "type": "tag",
        "begin": "<｜DSML｜ calls>\n",
        "content": _calls(tools, parallel),
        "end": "</｜DSML｜ calls>",
    }
    answer = {"type": "triggered_tags", "triggers": ["<｜DSML｜ calls>"], "tags": [block], "stop_after_first": True}
    return _tagged(_sequence(_thinking(), answer) if thinking else answer)


def after_thinking(grammar: StructuredOutputs) -> StructuredOutputs:
    """The same grammar for what follows the thinking, which stays free."""
    if grammar.structural_tag is not None:
        tag = json.loads(grammar.structural_tag) if isinstance(grammar.structural_tag, str) else grammar.structural_tag
        inner = tag.get("format")
        return _tagged(_sequence(_thinking(), inner)) if inner is not None else grammar
    return _tagged(_sequence(_thinking(), _as_format(grammar)))


def _as_format(grammar: StructuredOutputs) -> Format:
    if grammar.json_object:
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if grammar.json is not None:
        schema = json.loads(grammar.json) if isinstance(grammar.json, str) else grammar.json
        return {"type": "json_schema", "json_schema": schema}
    if grammar.regex is not None:
        return {"type": "regex", "pattern": grammar.regex}
    if grammar.choice is not None:
        return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in grammar.choice]}
    return {"type": "grammar", "grammar": grammar.grammar}
