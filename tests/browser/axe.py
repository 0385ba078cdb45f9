"""axe-core (vendor/axe.min.js) and what it finds in a page."""

from __future__ import annotations

from pathlib import Path

AXE = (Path(__file__).parent / "vendor" / "axe.min.js").read_text()
FINDINGS = """async () => {
  const { violations } = await axe.run(document, { rules: { "heading-order": { enabled: false } } });
  return violations.map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.html).join(" ")}`);
}"""
