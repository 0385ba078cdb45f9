"""Reads the text of PDFs that clients attach, in a sandboxed process. Source: PDFium, by pypdfium2."""
