#!/usr/bin/env bash
# Fetches the libraries of the web pages from npm, in these versions, and writes static/vendor anew. To move to another
# version: change it here, run this, then the browser tests.
set -euo pipefail

MARKDOWN_IT=14.3.3 KATEX=0.19.1 HIGHLIGHT=11.12.0 SWAGGER=5.35.0 PDFJS=6.5.438 AXE=4.14.1
COREJS=3.51.0 # which this pdfjs-dist contains; for its licence alone

cd "$(dirname "$0")/.."
pages=$PWD/moeserve/httpserver/web/static/vendor
tests=$PWD/tests/browser/vendor
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT

npm install --silent --ignore-scripts --omit=optional --prefix "$work" "markdown-it@$MARKDOWN_IT" "katex@$KATEX" \
  "@highlightjs/cdn-assets@$HIGHLIGHT" "swagger-ui-dist@$SWAGGER" "pdfjs-dist@$PDFJS" "core-js@$COREJS" \
  "axe-core@$AXE"
modules=$work/node_modules

rm -rf "$pages" "$tests"
mkdir -p "$pages/fonts" "$tests"
cp "$modules/markdown-it/dist/markdown-it.min.js" "$modules/katex/dist/katex.min.js" \
  "$modules/@highlightjs/cdn-assets/highlight.min.js" "$modules"/swagger-ui-dist/swagger-ui{-bundle.js,.css} \
  "$modules"/pdfjs-dist/legacy/build/pdf{,.worker}.min.mjs "$pages"
grep -q "\"$COREJS\"" "$pages/pdf.min.mjs" # COREJS is the version within
cp "$modules"/katex/dist/fonts/*.woff2 "$pages/fonts"
# woff2 alone: every browser that runs these pages reads it.
sed -E 's/,url\([^)]*\.(woff|ttf)\) format\("[a-z]+"\)//g' "$modules/katex/dist/katex.min.css" > "$pages/katex.min.css"
sed -i '/^\/\/# sourceMappingURL=/d' "$pages"/*.{js,mjs}
sed -i '/^\/\*# sourceMappingURL=/d' "$pages/swagger-ui.css"

cp "$modules/axe-core/axe.min.js" "$modules/axe-core/LICENSE" "$tests"

{
  echo "The web pages use these libraries, unchanged but for katex.min.css, which names no fonts other than woff2."
  echo "scripts/vendor_web.sh fetches them. markdown-it.min.js contains the libraries listed after it;"
  echo "pdf.min.mjs and pdf.worker.min.mjs are pdfjs-dist, with core-js and what calls OpenJPEG, JBig2 and QCMS;"
  echo "those in swagger-ui-bundle.js are listed at the end."
  for name in markdown-it linkify-it mdurl uc.micro punycode.js entities katex @highlightjs/cdn-assets \
      pdfjs-dist core-js swagger-ui-dist; do
    version=$(node -p "require('$modules/$name/package.json').version")
    printf '\n%s\n%s %s\n\n' "$(printf '=%.0s' {1..80})" "$name" "$version"
    cat "$modules/$name"/LICENSE*
  done
  for name in {,PDFJS_}{JBIG2,OPENJPEG,QCMS}; do
    printf '\n%s\nof pdfjs-dist: %s\n\n' "$(printf '=%.0s' {1..80})" "$name"
    cat "$modules/pdfjs-dist/wasm/LICENSE_$name"
  done
  printf '\n'
  cat "$modules/swagger-ui-dist/NOTICE" "$modules/swagger-ui-dist/swagger-ui-bundle.js.LICENSE.txt"
} > "$pages/LICENSES.txt"
