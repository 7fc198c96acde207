"""Pages, their figures and the words in them, of answers made by hand."""

import base64
import hashlib
import html.parser
import io
import re
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from modelyard.base import explain_words as words
from modelyard.handlers.explain.draw import bars, page
from modelyard.handlers.explain.draw import tokens as token_page
from modelyard.handlers.explain.draw.bars import Bar, Values
from modelyard.handlers.explain.draw.picture import Heat, Texts
from modelyard.handlers.explain.explanation import as_lists, as_npy

EVIL = "</style></script><script>alert(1)</script>\"'&"


def answer(**fields: Any) -> dict[str, Any]:
    return {
        "model": "loans",
        "version": "1.0",
        "label": "repays",
        "probability": 0.75,
        "method": "integrated_gradients",
        "output": "logit",
        "baseline": "zero",
        "f_input": 2.4,
        "f_baseline": 0.1,
        "convergence_delta": 0.0,
        "relative_delta": 0.0,
        "error": 0.0,
        "n_steps": 30,
        "tolerance": 0.05,
        "tolerance_met": True,
        "warnings": [],
    } | fields


class Seen(html.parser.HTMLParser):
    """What a page holds."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(content.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)


def rendered(*parts: dict[str, Any], figure: str = "", before: str = "") -> bytes:
    sums = (3.1, -0.8)
    made = [
        page.Part(each, figure, words.shares(each, sums), True, words.notes(each, sums, "pixel"))
        for each in parts
    ]
    return page.render(made, before)


def test_a_page_is_complete_in_itself_and_runs_nothing_else() -> None:
    evil = answer(label=EVIL, model=EVIL, baseline=EVIL, warnings=[EVIL], layer=EVIL)
    content = rendered(evil)
    seen = Seen(content)
    assert [tag for tag, _ in seen.tags].count("script") == 1
    for _, attributes in seen.tags:
        assert not {"style", "src", "href"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
    policy = next(a["content"] for _, a in seen.tags if "content" in a and "http-equiv" in a)
    assert policy == page.POLICY
    assert "default-src 'none'" in page.POLICY and "unsafe" not in page.POLICY
    for tag in ("style", "script"):
        (text,) = seen.texts[tag]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in page.POLICY
    assert not re.search(rb"https?:|url\(|@import", content)
    assert "".join(seen.texts["h2"]).startswith(f"Why “{EVIL}”?")


def test_a_page_says_what_was_asked_and_what_came_out() -> None:
    text = rendered(answer(), answer(label="defaults", probability=0.25)).decode()
    for said in (
        "<h1>loans 1.0</h1>",
        "Why “repays”? <small>probability 0.750</small>",
        "Why “defaults”? <small>probability 0.250</small>",
        "logit from 0.1 (baseline zero) to 2.4: +3.1 for, −0.8 against",
        "integrated gradients, 30 points · exact · adds up exactly",
        '<th>tolerance</th><td colspan="2">0.05</td>',
        "<th>label</th><td>repays</td><td>defaults</td>",
    ):
        assert said in text


def test_fields_that_are_not_known_yet_are_shown_too() -> None:
    text = rendered(answer(new={"top_share": 0.5, "is_good": False}, tokens=[{}])).decode()
    assert "<th>new top share</th><td>0.5</td>" in text
    assert "<th>new is good</th><td>no</td>" in text
    assert "<th>tokens</th>" not in text


def test_a_picture_is_uncovered_by_a_slider() -> None:
    image = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8) * 3)
    plain, figure = page.picture(image, Heat(np.eye(8)), EVIL)
    before = rendered(answer(), figure=figure, before=plain)
    images = [attributes for tag, attributes in Seen(before).tags if tag == "img"]
    sources = [str(each["src"]) for each in images]
    assert len(images) == 3 and sources[0] == sources[1] != sources[2]
    sizes = set()
    for source in sources:
        kind, _, data = source.partition(";base64,")
        assert kind == "data:image/png"
        sizes.add(Image.open(io.BytesIO(base64.b64decode(data))).size)
    assert sizes == {(320, 320)}
    assert "over" in str(images[2]["class"])
    assert images[2]["alt"] == f"attributions for {EVIL}"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (3.14159, "3.14"),
        (-0.00054321, "−0.000543"),
        (54321.6, "54322"),
        (1e9, "1e+09"),
    ],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert words.number(value) == text


@pytest.mark.parametrize(
    ("probability", "text"),
    [(0.0, "0.000"), (1e-9, "< 0.001"), (0.5, "0.500"), (0.99999, "> 0.999"), (1.0, "1.000")],
)
def test_a_chance_is_not_said_to_be_nothing_or_all(probability: float, text: str) -> None:
    assert words.chance(probability) == text


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"error": 0.0123}, "integrated gradients, 30 points · error 1.2 % · adds up exactly"),
        ({"error": 11.9}, "integrated gradients, 30 points · error 1190 % · adds up exactly"),
        ({"error": None, "relative_delta": None, "n_steps": 1}, "integrated gradients"),
        (
            {"relative_delta": 0.031, "layer": "features.0"},
            "integrated gradients of features.0, 30 points · exact · sum off by 3.1 %",
        ),
    ],
)
def test_errors_are_said_in_words(fields: dict[str, Any], expected: str) -> None:
    assert words.made(answer(**fields)) == expected


def test_what_a_reader_has_to_know_is_said() -> None:
    assert words.notes(answer(), (3.1, -0.8), "pixel") == []
    assert words.notes(answer(), (0.0, 0.0), "pixel") == ["no pixel changes this output"]
    (unmet,) = words.notes(answer(tolerance_met=False, error=0.12), (1.0, 0.0), "pixel")
    assert unmet.startswith("less sure than asked for: error 12 %, 5 % were to be met")
    checked = answer(check={"summary": "the top tenth lowers the output by 3"})
    assert words.notes(checked, (1.0, 0.0), "pixel") == ["the top tenth lowers the output by 3"]
    warned = words.notes(answer(warnings=["the text was cut off"]), (1.0, 0.0), "word", 0.25)
    assert warned == ["the text was cut off", "pale is what is below its own error: 25 % of all"]


def test_what_does_not_add_up_is_not_said_to() -> None:
    told = answer(convergence_delta=None, probability=None)
    assert words.question(told) == "output “repays”"
    assert words.shares(told, (3.0, -1.0)) == (
        "output from 0.1 (baseline zero) to 2.4; +3 for, −1 against, which need not add up to that"
    )


BARS = [Bar("age", -0.7, "41", 0.1), Bar("smoker", 3.0, "yes", 0.1), Bar("zip", 0.0, "1", 0.0)]


def test_a_waterfall_leads_from_the_baseline_to_the_input() -> None:
    chart = bars.chart(BARS, answer())
    assert [step.bar.name for step in chart.steps] == ["smoker", "age", "zip"]
    ends = [chart.zero, *(step.end for step in chart.steps)]
    assert [step.start for step in chart.steps] == ends[:-1]
    assert ends == pytest.approx([0, 1, 2.3 / 3, 2.3 / 3])
    text = bars.figure(BARS, answer())
    places = [text.index(each) for each in ("baseline zero", "smoker", "+3<", "−0.7", "this input")]
    assert places == sorted(places)
    assert "age <b>41</b>" in text


@pytest.mark.parametrize(
    ("value", "expected"),
    [(3.0, [0, 1, 2, 3]), (0.9, [0, 0.2, 0.4, 0.6, 0.8]), (-5e6, [-4e6, -2e6, 0]), (0.0, [])],
)
def test_a_chart_has_an_axis_of_round_values(value: float, expected: list[float]) -> None:
    chart = bars.chart([Bar("a", value)], None)
    assert [at for _, at in chart.ticks] == pytest.approx(expected)
    low, size = min(0.0, value), abs(value) or 1
    assert [place for place, _ in chart.ticks] == pytest.approx(
        [(at - low) / size for at in expected]
    )
    text = bars.figure([Bar("a", value)], None)
    assert all(f">{words.number(at)}</text>" in text for at in expected)
    assert ("axis" in text) == bool(expected)


def test_what_the_attributions_leave_over_is_a_bar() -> None:
    chart = bars.chart([Bar("a", 1.0)], answer(f_input=2.1))
    assert [(step.bar.name, step.bar.value) for step in chart.steps] == [
        ("a", 1.0),
        ("left over", 1.0),
    ]


def test_what_promises_no_sum_has_bars_from_one_line() -> None:
    chart = bars.chart(BARS, answer(convergence_delta=None))
    assert not chart.is_way
    assert chart.zero == pytest.approx(0.7 / 3.7)
    assert {step.start for step in chart.steps} == {chart.zero}
    assert "this input" not in bars.figure(BARS, answer(convergence_delta=None))


def test_many_bars_are_gathered_and_nothing_is_lost() -> None:
    many = [Bar(f"x{at}", (-1) ** at * at, error=0.5) for at in range(60)]
    few = bars.gathered(many)
    assert len(few) == bars.MOST_BARS + 2
    assert [bar.name for bar in few[-2:]] == ["19 others", "20 others"]
    assert bars.sums(few) == pytest.approx(bars.sums(many))
    tensor = torch.tensor([bar.value for bar in many]).view(6, 10)
    found = bars.largest({"x": Values(tensor, torch.full((6, 10), 0.5), tensor)})
    assert found[0] == Bar("x[5,9]", -59.0, "-59", 0.5)
    assert bars.sums(found) == pytest.approx(bars.sums(many))
    assert len(found) == len(few)


def test_an_uncertain_bar_is_pale_and_one_of_nothing_is_not_there() -> None:
    text = bars.figure([Bar("a", 1.0, error=2.0), Bar("b", 2.0, error=1.0), Bar("c", 0.0)], None)
    assert re.findall(r'class="(for[^"]*|against[^"]*)"', text) == ["for", "for pale", "against"]
    assert 'width="0.00"' in text
    assert text.count("pale") == 1
    assert bars.figure([Bar("a", 1.0)], None, 0.3).count("pale") == 1


def test_bars_are_a_picture_too() -> None:
    texts = Texts("Why?", "p = 1", "loans 1.0", ["a note"])
    sheet = Image.open(io.BytesIO(bars.render(BARS, answer(), texts)))
    colours = {colour for _, colour in sheet.convert("RGB").getcolors(1 << 24) or []}
    assert {(178, 24, 43), (33, 102, 172)} <= colours
    pale = bars.render([Bar("a", 1.0, error=2.0)], answer(f_input=1.1), texts)
    drawn = {colour for _, colour in Image.open(io.BytesIO(pale)).getcolors(1 << 24) or []}
    assert (178, 24, 43) not in drawn


def token(text: str, start: int, value: float, word: int | None, **more: Any) -> dict[str, Any]:
    return {
        "token": text,
        "start": start,
        "end": start + len(text.removeprefix("##")) if word is not None else start,
        "is_special": word is None,
        "attribution": value,
        "word": word,
        **more,
    }


def test_pieces_of_a_word_are_one_and_what_was_not_read_is_grey() -> None:
    text = "unbelievably <bad> film"
    tokens = [
        token("[CLS]", 0, 0.0, None),
        token("un", 0, 0.5, 0, error=0.1),
        token("##believ", 2, 0.75, 0, error=0.2),
        token("##ably", 8, -0.25, 0, error=0.3),
        token("<", 13, -0.5, 1, error=0.75),
        token("bad", 14, 0.125, 2, error=0.0),
        token("[SEP]", 0, 0.0, None),
    ]
    found = token_page.words_of(text, tokens)
    assert [word.text for word in found] == ["[CLS]", "unbelievably", "<", "bad", "[SEP]"]
    assert found[1].value == 1.0 and found[1].error == pytest.approx(0.6)
    shown = token_page.figure(text, found)
    assert '<span class="word p10">unbelievably</span><sub>+1</sub>' in shown
    assert '<span class="word n2">&lt;</span><sub>−0.5</sub>' in shown, "half, and pale"
    assert '<span class="word p1">bad</span></span>' in shown, "too little for a number"
    assert '<span class="unread">&gt; film</span>' in shown
    read = re.sub(r"<sub>.*?</sub>|<[^>]*>", "", shown)
    assert read == "[CLS]unbelievably &lt;bad[SEP]&gt; film"
    assert [bar.name for bar in token_page.strongest(found)] == ["unbelievably", "<", "bad"]


def test_numbers_have_the_digits_that_they_hold() -> None:
    values = torch.tensor([[0.1, -2.5e-7], [1 / 3, 1e20]])
    assert str(as_lists(values)) == "[[0.1, -2.5e-07], [0.33333334, 1e+20]]"
    assert torch.equal(torch.tensor(as_lists(values)), values)
    assert as_lists(values.double()) == values.double().tolist()
    assert as_lists(torch.tensor([0.1]).bfloat16()) == [0.100097656]
    assert as_lists(torch.tensor(0.5)) == 0.5
    loaded = np.load(io.BytesIO(as_npy(values.bfloat16())), allow_pickle=False)
    assert loaded.dtype == np.float32
    assert loaded.tolist() == values.bfloat16().float().tolist()
