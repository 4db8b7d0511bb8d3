// Set the formulas that Markdown marks, by the KaTeX that lies beside this file.
for (const formula of document.querySelectorAll(".arithmatex")) {
  const text = formula.textContent.trim()
  const shown = text.startsWith("\\[")
  katex.render(text.slice(2, -2), formula, { displayMode: shown, throwOnError: false })
}
