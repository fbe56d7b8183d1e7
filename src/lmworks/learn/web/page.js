// A form with data-into sends itself and puts the answer, HTML of the server's own, into that element.
"use strict";
const turns = {};  // element → how many answers were asked for: a late one is left out

document.addEventListener("submit", async event => {
  const form = event.target, into = form.dataset.into;
  if (!into) return;
  event.preventDefault();
  const target = document.getElementById(into), turn = turns[into] = (turns[into] || 0) + 1;
  const sent = new URLSearchParams(new FormData(form));
  const button = form.querySelector("button");
  if (button) button.disabled = true;
  target.setAttribute("aria-busy", "true");
  let answer;
  try {
    const asked = form.method === "get"
      ? await fetch(`${form.action}?${sent}`) : await fetch(form.action, {method: "POST", body: sent});
    answer = await asked.text();
  } catch {
    answer = "<p class=\"bad\">No answer: is <code>lmworks learn serve</code> still running?</p>";
  }
  if (button) button.disabled = false;
  if (turn !== turns[into]) return;
  target.innerHTML = answer;
  target.removeAttribute("aria-busy");
  for (const next of target.querySelectorAll("form[data-now]")) next.requestSubmit();
});

document.addEventListener("input", event => {
  const form = event.target.form;
  if (form && "live" in form.dataset) form.requestSubmit();
});
