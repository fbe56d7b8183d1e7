"""The planner's pages as text: the command's own figures, nothing from outside, nothing executed. What the script draws
is looked at in tests/browser."""

import json
import re
from html.parser import HTMLParser

import pytest

from lmworks.plan.search.candidates import problem_of
from lmworks.plan.search.search import search
from lmworks.report import plan_page
from lmworks.report.plan_page import memory_page, resource_text, round_times, search_page
from lmworks.spec import load_run
from plan_facts import GIB, layout, memory_facts, search_facts, verdict_facts
from typed import lmworks

VOID = {"meta", "input"}


class Page(HTMLParser):
    """Tags with their attributes, the text between them, and the data carried; refuses tags that do not match."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.text, self.data = [], [], "", ""
        self.feed(text)
        assert self.open == []
        self.facts = json.loads(self.data)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.tags and self.tags[-1][1].get("id") == "facts" and self.open[-1] == "script":
            self.data += data
        elif self.open and self.open[-1] not in ("style", "script"):
            self.text += data + "|"

    def filters(self):
        return [attrs["data-filter"] for tag, attrs in self.tags if tag == "select" and "data-filter" in attrs]


@pytest.mark.parametrize("name", ["memory", "search"])
def test_page_is_self_contained(name):
    text = memory_page(memory_facts()) if name == "memory" else search_page(search_facts())
    assert "default-src 'none'" in text
    page = Page(text)
    assert not [attrs for _, attrs in page.tags if attrs.keys() & {"src", "href", "action", "srcset"}]
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    addresses = set(re.findall(r"\w+://[\w./]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # the name of SVG, which nobody fetches


def keys(facts):
    """Keys at every depth; names of parts are free, and of a list the first stands for all."""
    if isinstance(facts, list):
        return keys(facts[0]) if facts else None
    if not isinstance(facts, dict):
        return None
    return {key: None if key in ("parts", "hidden", "tags") else keys(value) for key, value in facts.items()}


def test_memory_data_equal_command(capsys):
    code, out, _ = lmworks(capsys, "plan", "memory", "tiny", "--cluster", "2xh100", "--pp", "2", "--json")
    assert code == 0
    assert keys(json.loads(out)) == keys(memory_facts())


def test_search_data_equal_command(capsys):
    asked = ["--cluster", "2xh100", "--explain", "tp=2 zero=1"]
    code, out, _ = lmworks(capsys, "plan", "search", "tiny", *asked, "--json")
    assert code == 0
    real, ours = keys(json.loads(out)), keys(search_facts(explained=verdict_facts()))
    assert ours["front"].pop("timeline", "none") is None  # only a page has it
    assert ours["explained"].pop("layout").keys() < real["explained"].pop("layout").keys()
    assert real == ours


def test_page_embeds_data():
    assert Page(memory_page(memory_facts())).facts == memory_facts()
    assert Page(search_page(search_facts())).facts == search_facts()


def test_memory_text():
    text = Page(memory_page(memory_facts())).text
    assert "small|fits|8 × H100-SXM-80GB · pp=2, dp=4 ZeRO-1|" in text
    assert "reserved|52 GiB|" in text and "allocated|47 GiB|" in text
    assert "usable|78 GiB|of 79 GiB|" in text and "out of memory|12%|" in text
    assert "host|" not in text
    changed = memory_facts(fits=False, host=3.0 * GIB)
    text = Page(memory_page(changed)).text
    assert "small|does not fit|" in text and "host|3 GiB|" in text


def test_pareto_front_table():
    text = Page(search_page(search_facts())).text
    assert "12,345 legal layouts, 321 fit, 4 on the front" in text
    assert "tp=1, pp=2, recompute none|210k|1.25 s|64.0%|60.0|25%|125|1|2|4|none|" in text
    assert "The same in all of them: GPU H100-SXM-80GB, GPUs 8, context parallel 1, expert parallel 1" in text


def two_clusters():
    """Four layouts on H100s, and the same on half the price and speed of 16 A100s."""
    facts = search_facts()
    other = [one | {"gpu": "A100-SXM-80GB", "gpus": 16, "step_s": 2 * one["step_s"]} for one in facts["front"]]
    other = [one | {"bill": one["bill"] | {"dollars": 25e3 * one["step_s"]}} for one in other]
    fronts = [facts["front"], other]
    return facts | {"fronts": fronts, "fastest": [front[0] for front in fronts]}


def test_answer_and_cost_come_first():
    text = search_page(search_facts())
    page = Page(text)
    assert (
        "Fastest: 10 days and $100k for 1T tokens, with tp=1, pp=1, recompute none on 8 × H100-SXM-80GB.|" in page.text
    )
    assert "Cheapest" not in page.text  # on one cluster it is the fastest
    places = [text.index(f'id="{name}"') for name in ("tiles", "controls", "pareto", "front", "memory", "waterfall")]
    assert places == sorted(places) and text.index("Fastest: 10 days") < places[0]


def test_unknown_price():
    facts = search_facts()
    for one in facts["front"]:
        one["bill"]["dollars"] = None
    assert "10 days and a price that is not known (cluster.price_hour sets it)" in Page(search_page(facts)).text


def test_front_per_cluster():
    page = Page(search_page(two_clusters()))
    assert (
        "Cheapest: 10 days and $50k for 1T tokens, with tp=1, pp=1, recompute none on 16 × A100-SXM-80GB.|" in page.text
    )
    assert "8 × H100-SXM-80GB|tp=1, pp=1, recompute none|10|100k|262k|80.0%|70.0|" in page.text
    assert "16 × A100-SXM-80GB|tp=1, pp=1, recompute none|10|50k|262k|80.0%|70.0|" in page.text
    carried = [(one["gpus"], one["step_s"]) for one in page.facts["front"]]
    assert carried == [(8, 1.0), (8, 1.25), (8, 2.0), (16, 2.0), (16, 2.5), (8, 4.0), (16, 4.0), (16, 8.0)]
    assert "cluster|GPU|" in page.text  # what points are coloured by
    assert "Cluster by cluster" not in Page(search_page(search_facts())).text


def test_search_returns_front_per_cluster():
    base = load_run("tiny", [])
    questions = [problem_of(base, text, own=base.cluster) for text in ("2xh100", "2xa100")]
    found = search(questions)
    assert [{one.problem.gpu.name for one in front} for front in found.fronts] == [
        {questions[0].gpu.name},
        {questions[1].gpu.name},
    ]
    for front in found.fronts:  # every further one is slower and leaves more memory free
        assert [one.step_s for one in front] == sorted(one.step_s for one in front)
        assert [one.reserved for one in front] == sorted((one.reserved for one in front), reverse=True)
    assert search(questions[:1]).fronts == ()


def test_filters_cover_varying_keys():
    page = Page(search_page(search_facts()))
    assert page.filters() == ["tp", "pp", "dp_shard", "recompute"]
    assert "pipeline|any|1|2|4|" in page.text
    slider = next(attrs for _, attrs in page.tags if attrs.get("id") == "most")
    assert (slider["min"], slider["max"], slider["value"]) == ("30", "70", "70")


def test_clusters_are_distinguished():
    facts = search_facts()
    facts["front"][3] |= {"gpu": "A100-SXM-80GB", "gpus": 16}
    page = Page(search_page(facts))
    assert page.filters()[:2] == ["gpu", "gpus"]
    assert "8 × H100-SXM-80GB or 16 × A100-SXM-80GB" in page.text


@pytest.mark.parametrize("front", [[], search_facts()["front"][:1]])
def test_empty_and_single_fronts(front):
    page = Page(search_page(search_facts(front=front)))
    assert page.filters() == []
    assert ("No layout fits." in page.text) == (not front)


def test_layout_explanation():
    text = Page(search_page(search_facts(explained=verdict_facts()))).text
    assert "Explained: tp=8 zero=1|" in text and "needs 99 GiB|" in text and "zero=3 & more|" in text


def test_names_are_escaped():
    evil = "</script><script>alert(1)</script><b onclick=x>"
    facts = search_facts(model=evil)
    facts["front"][0] |= {"text": evil, "gpu": evil}
    facts["front"][0]["layout"]["schedule"] = evil
    clean = [tag for tag, _ in Page(search_page(search_facts())).tags]
    for text, name in ((search_page(facts), "model"), (memory_page(memory_facts(name=evil, layout=evil)), "name")):
        page = Page(text)
        assert page.facts[name] == evil
        tags = [tag for tag, _ in page.tags]
        assert tags.count("script") == clean.count("script") and "b" not in tags


def test_missing_numbers_are_blank():
    facts = search_facts()
    facts["front"][0]["mfu"] = float("nan")
    page = Page(search_page(facts))
    assert page.facts["front"][0]["mfu"] is None
    facts["front"][0]["mfu"] = None
    assert "262k|1 s|–|" in Page(search_page(facts)).text


def test_timelines_fit_into_the_page(monkeypatch):
    monkeypatch.setattr(plan_page, "MAX_SPANS", 5)  # the second layout has 4, the third 8
    front = Page(search_page(search_facts())).facts["front"]
    assert [one["timeline"] and len(one["timeline"]) for one in front] == [None, 4, None, None]
    assert round_times([[0, 0, "F", 0, 0.0, 1 / 3], [0, 0, "B", 0, 1 / 3, 20 / 3]]) == [
        [0, 0, "F", 0, 0.0, 0.3333],
        [0, 0, "B", 0, 0.3333, 6.6667],
    ]


def test_a_front_without_timelines():
    one = layout(1.0, search_facts()["front"][1]["stages"])
    del one["timeline"]
    assert Page(search_page(search_facts(front=[one]))).facts["front"][0]["timeline"] is None


def test_script_does_not_use_inner_html():
    script = resource_text("plan_charts.js") + resource_text("plan_page.js")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(|fetch\(", script)
