"""An answer with everything that the chat page formats."""

from __future__ import annotations

RICH = r"""1. one
   - [x] done
   - [ ] to do, with $a_1 * b_2 * c$ and \(\vec{x}_1\)
2. **bold _and_ more**

| l | c | r |
|:--|:-:|--:|
| 1 | 2 | 3 |

$$\zeta(s) = \sum_{n=1}^\infty \frac{1}{n^s}$$

\begin{align}
a &= \cancel{b} \\
c &= \sqrt[3]{d}
\end{align}

It costs $5 and then $6; `$x$` is code. $\undefinedmacro$ and \[ not closed

```python
def f(x): return "a"
```
"""
