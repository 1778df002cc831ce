"""Texts of gpt-oss as messages, in the form of OpenAI's library for them."""

from __future__ import annotations

from typing import Any

from evener_generation.harmony import HarmonyReasoning
from evener_generation.harmony_messages import harmony_messages

PROMPT = (
    "<|start|>system<|message|>You are ChatGPT.\n\n# Valid channels: analysis, commentary, final.<|end|>"
    "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|><|start|>user<|message|>Weather?<|end|>"
    '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>'
    "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>sunny<|end|><|start|>assistant"
)


def message(role: str, text: str, name: str | None = None, **more: str) -> dict[str, Any]:
    return {"role": role, "name": name, "content": [{"type": "text", "text": text}], **more}


def test_messages_of_prompt_and_answer_have_their_author_channel_recipient_and_text() -> None:
    answer = "<|channel|>analysis<|message|>I know.<|end|><|start|>assistant<|channel|>final<|message|>Sunny.<|return|>"
    asked, answered = HarmonyReasoning.messages(PROMPT, answer)
    call = {"channel": "commentary", "recipient": "functions.weather", "content_type": "json"}
    assert asked == [
        message("system", "You are ChatGPT.\n\n# Valid channels: analysis, commentary, final."),
        message("developer", "# Instructions\n\nBe brief."),
        message("user", "Weather?"),
        message("assistant", '{"city": "Rome"}', **call),
        message("tool", "sunny", "functions.weather", channel="commentary", recipient="assistant"),
    ]
    assert answered == [
        message("assistant", "I know.", channel="analysis"), message("assistant", "Sunny.", channel="final"),
    ]  # fmt: skip


def test_a_call_keeps_the_mark_before_its_type_and_may_name_its_recipient_behind_the_channel() -> None:
    _, (call,) = harmony_messages(
        PROMPT, "<|channel|>commentary to=functions.weather<|constrain|>json<|message|>{}<|call|>"
    )
    assert call == message(
        "assistant", "{}", channel="commentary", recipient="functions.weather", content_type="<|constrain|>json"
    )


def test_a_message_that_the_prompt_leaves_open_goes_on_in_the_answer_under_its_head() -> None:
    opened = PROMPT + "<|channel|>final<|message|>"
    for begun, told in ("", "It is sunny."), ("It is", " sunny."):
        asked, answered = harmony_messages(opened + begun, f"{told}<|return|>")
        assert [each["content"][0]["text"] for each in asked[5:]] == [begun] * bool(begun)
        assert answered == [message("assistant", told, channel="final")]


def test_a_message_that_is_cut_off_is_there_and_a_head_that_is_cut_off_is_not() -> None:
    cut = "<|channel|>analysis<|message|>I kn"
    assert harmony_messages(PROMPT, cut)[1] == [message("assistant", "I kn", channel="analysis")]
    for rest in ("<|start|>", "<|start|>assistant<|channel|>fi"):
        assert harmony_messages(PROMPT, f"{cut}<|end|>{rest}")[1] == [message("assistant", "I kn", channel="analysis")]
    assert harmony_messages(PROMPT, "<|channel|>fin")[1] == []
    # The next message begins where no mark ends the one before.
    kept = harmony_messages(PROMPT, f"{cut}<|start|>assistant<|channel|>final<|message|>x")[1]
    assert [each["channel"] for each in kept] == ["analysis", "final"]


def test_text_without_a_head_is_a_message_and_marks_alone_are_none() -> None:
    assert harmony_messages(PROMPT, "Sunny.") == (harmony_messages(PROMPT, "")[0], [message("assistant", "Sunny.")])
    assert harmony_messages(PROMPT, "<|end|><|return|>")[1] == []
    assert harmony_messages("", "<|message|>a <|message|> b<|end|>") == ([], [message("assistant", "a <|message|> b")])
    assert harmony_messages("<|start|>user:ann<|message|>Hi<|end|>", "") == ([message("user", "Hi", "ann")], [])
