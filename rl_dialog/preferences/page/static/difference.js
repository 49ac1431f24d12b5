// Marks the words in which two elements differ: those that no longest common subsequence of their words has.

// A vowel sign, an accent or a skin tone is never torn from what it stands on, and where words are written without spaces each character is one.
const UNSPACED = "[\\p{scx=Han}\\p{scx=Hira}\\p{scx=Kana}\\p{scx=Thai}\\p{scx=Lao}\\p{scx=Khmr}\\p{scx=Mymr}]\\p{M}*";
const WORD = new RegExp(`${UNSPACED}|[\\p{L}\\p{N}\\p{M}_]+|\\p{RI}\\p{RI}|[^\\s\\p{L}\\p{N}\\p{M}_](?:[\\p{M}\\p{Emoji_Modifier}]|\\u200d.)*`, "gu");
const MOST_CELLS = 4_000_000; // of the table of common lengths
const LEAST_COMMON = 0.3; // share of the words; of texts that have less in common nearly all would be marked

/** Wraps what is in only one of the two into <mark>. False where they have too little in common, or are too long, and nothing is marked. */
export function markDifference(one, other) {
  const [mine, yours] = [wordsOf(one), wordsOf(other)];
  const common = commonWords(mine.map(({ word }) => word), yours.map(({ word }) => word));
  if (!common || 2 * common[0].size < LEAST_COMMON * (mine.length + yours.length)) return false;
  mark(mine, common[0]);
  mark(yours, common[1]);
  return true;
}

function wordsOf(element) {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const words = [];
  while (walker.nextNode()) {
    for (const { 0: word, index } of walker.currentNode.data.matchAll(WORD)) words.push({ word, node: walker.currentNode, from: index, to: index + word.length });
  }
  return words;
}

/** The places of the common words in both; null where that would take too long. */
function commonWords(mine, yours) {
  let start = 0;
  while (start < Math.min(mine.length, yours.length) && mine[start] === yours[start]) start++;
  let end = 0;
  while (end < Math.min(mine.length, yours.length) - start && mine.at(-1 - end) === yours.at(-1 - end)) end++;
  const [rows, columns] = [mine.length - start - end, yours.length - start - end];
  if (rows * columns > MOST_CELLS) return null;
  const width = columns + 1;
  const longest = new Uint32Array((rows + 1) * width); // of the rests from here on
  for (let i = rows - 1; i >= 0; i--) {
    for (let j = columns - 1; j >= 0; j--) {
      longest[i * width + j] = mine[start + i] === yours[start + j] ? longest[(i + 1) * width + j + 1] + 1 : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
    }
  }
  const found = [new Set(), new Set()];
  const add = (i, j) => (found[0].add(i), found[1].add(j));
  for (let n = 0; n < start; n++) add(n, n);
  for (let n = 1; n <= end; n++) add(mine.length - n, yours.length - n);
  for (let i = 0, j = 0; i < rows && j < columns; ) {
    if (mine[start + i] === yours[start + j]) add(start + i++, start + j++);
    else if (longest[(i + 1) * width + j] >= longest[i * width + j + 1]) i++;
    else j++;
  }
  return found;
}

/** Neighbouring words are marked together, with the spaces between them. */
function mark(words, common) {
  const runs = [];
  words.forEach((word, place) => {
    if (common.has(place)) return;
    const last = runs.at(-1);
    if (last && last.place === place - 1 && last.node === word.node) Object.assign(last, { place, to: word.to });
    else runs.push({ place, node: word.node, from: word.from, to: word.to });
  });
  for (const { node, from, to } of runs.reverse()) { // from the end, so that earlier places in a text stay
    const range = document.createRange();
    range.setStart(node, from);
    range.setEnd(node, to);
    range.surroundContents(document.createElement("mark"));
  }
}
