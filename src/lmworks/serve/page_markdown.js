// Markdown of an answer as elements. Nothing is ever parsed as HTML: text goes in as text nodes, so a tag in an answer
// is shown, not run. An answer that is still being written may end inside a block: a fence without its end is code.

function made(name, ...children) {
  const one = document.createElement(name);
  one.append(...children);
  return one;
}

const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|\*(?=[^\s*])([^*\n]*?[^\s*])\*(?!\*)|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)/g;

function inline(text) {
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, , code, strong, emphasis, label, address] = found;
    parts.push(text.slice(end, found.index));
    end = found.index + whole.length;
    if (code !== undefined) parts.push(made("code", code));
    else if (strong !== undefined) parts.push(made("strong", ...inline(strong)));
    else if (emphasis !== undefined) parts.push(made("em", ...inline(emphasis)));
    else parts.push(link(label, address));
  }
  return [...parts, text.slice(end)].filter(part => part !== "");
}

function link(label, address) {
  const anchor = made("a", label);
  anchor.href = address; // http or https, by the pattern above
  anchor.rel = "noopener noreferrer nofollow";
  anchor.target = "_blank";
  anchor.title = address; // a label may say one place and lead to another
  return anchor;
}

const ITEM = /^\s{0,6}(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const STARTS = [/^\s{0,3}(```|~~~)/, /^#{1,6}\s/, /^>\s?/, ITEM];

// The blocks of a text, in order.
function markdown(text) {
  const lines = text.split("\n"), blocks = [];
  const taken = test => {
    const some = [];
    while (lines.length && test(lines[0])) some.push(lines.shift());
    return some;
  };
  while (lines.length) {
    const line = lines[0], fence = line.match(/^\s{0,3}(`{3,}|~{3,})(.*)$/), heading = line.match(/^(#{1,6})\s+(.*)$/);
    if (!line.trim()) lines.shift();
    else if (fence) {
      lines.shift();
      const code = taken(one => !one.trim().startsWith(fence[1]));
      lines.shift();
      blocks.push(made("pre", made("code", code.join("\n"))));
    } else if (heading) {
      lines.shift();
      blocks.push(made(`h${Math.min(6, heading[1].length + 2)}`, ...inline(heading[2])));
    } else if (/^>\s?/.test(line)) {
      blocks.push(made("blockquote", ...markdown(taken(one => /^>\s?/.test(one)).map(one => one.replace(/^>\s?/, "")).join("\n"))));
    } else if (ITEM.test(line)) blocks.push(list(taken(one => ITEM.test(one))));
    else blocks.push(made("p", ...inline(taken(one => one.trim() && !(one !== line && STARTS.some(start => start.test(one)))).join("\n"))));
  }
  return blocks;
}

function list(items) {
  const first = items[0].match(ITEM)[1], entries = items.map(item => made("li", ...inline(item.match(ITEM)[2])));
  const whole = made(first === undefined ? "ul" : "ol", ...entries);
  if (first !== undefined) whole.start = Number(first);
  return whole;
}
