"""The course's page in a browser: a hint, a check that fails and one that passes, the planner's tables as one chooses.

SCREENSHOTS=FOLDER make test-browser    # keeps pictures
"""

import os
import subprocess
import sys

import pytest

from lmworks.learn.exercise import exercises
from lmworks.learn.workspace import Workspace

pytestmark = pytest.mark.browser
WRONG = "a, b = x.chunk(2, -1)\nreturn torch.cat((b, -a), -1)\n"


@pytest.fixture
def served(tmp_path):
    learner = Workspace.create(tmp_path / "course")
    process = subprocess.Popen(
        [sys.executable, "-m", "lmworks", "learn", "serve"], cwd=learner.folder, stdout=subprocess.PIPE, text=True
    )
    yield learner, process.stdout.readline().strip()
    process.terminate()
    process.wait(20)


@pytest.fixture
def page(chromium, served):
    wrong = []
    context = chromium.new_context(viewport={"width": 1180, "height": 900})
    found = context.new_page()
    found.set_default_timeout(60_000)
    found.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    found.on("pageerror", lambda error: wrong.append(str(error)))
    found.on("request", lambda request: None if request.url.startswith(served[1]) else wrong.append(request.url))
    yield found
    context.close()
    assert wrong == []


def keep(page, name):
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=f"{folder}/course-{name}.png", full_page=name != "home")


def test_from_the_first_look_to_a_pass(page, served):
    learner, url = served
    page.goto(url)
    keep(page, "home")
    page.click("text=2. rotate_half")
    page.click("text=Hint 1 of 3")
    page.wait_for_selector("text=Hint 2 of 3")
    learner.rewrite(exercises()["rotate_half"], lambda _: WRONG)
    page.click("text=Check")
    assert "Perhaps: The wrong half is negated" in page.wait_for_selector(".verdict").inner_text()
    assert "torch.cat((b, -a), -1)" in page.inner_text("#work")
    keep(page, "lesson")
    learner.apply_solution(exercises()["rotate_half"])
    page.click("text=Check")
    assert "reference" in page.wait_for_selector("#effect .verdict").inner_text()  # asked for without a click
    page.check('input[value="1"]')
    page.click("text=Answer")
    page.wait_for_selector("text=Right.")


def test_the_tables_follow_what_is_chosen(page, served):
    page.goto(served[1] + "what-if")
    assert page.inner_text("tr.chosen >> nth=0").startswith("1")
    page.select_option("select[name=zero]", "3")
    page.wait_for_selector('tr.chosen td:text-is("3")')
    page.select_option("select[name=pp]", "4")
    page.wait_for_selector("text=needs at least 4 micro-batches")
    page.select_option("select[name=zero]", "1")
    page.wait_for_selector('tr.chosen td:text-is("1")')
    keep(page, "what-if")


def test_an_interview_question(page, served):
    page.goto(served[1] + "interview/bubble")
    page.fill("textarea", "stages that wait")
    page.click("text=Compare with the rubric")
    page.check('input[name="1"]')
    page.click("text=Record")
    page.wait_for_selector("text=1 of 5 points.")
    assert page.input_value("textarea") == "stages that wait"
    page.fill("input[name=number]", "0.1 %")
    page.click('button:text-is("Answer")')
    assert page.wait_for_selector("#number p").inner_text().startswith("No:")
    keep(page, "interview")
