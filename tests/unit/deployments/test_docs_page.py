"""The script of /docs, run over the document that it shows; skipped where there is no node."""

import json
import re
import shutil
import subprocess

import pytest

from deployments.docs_page import make_docs_response
from deployments.openapi import build_openapi
from deployments.openapi_operations import OPERATIONS

NODE = shutil.which("node")

# As much of a browser as the script uses. Prints the page's text with a line per text node.
BROWSER = """
class Element {
  constructor(tag) { this.tagName = tag.toUpperCase(); this.parts = []; }
  append(...parts) {
    for (const part of parts) if (!(part instanceof Element || typeof part === "string")) {
      throw new Error("appended " + typeof part);
    }
    this.parts.push(...parts);
  }
  replaceChildren(...parts) { this.parts = []; this.append(...parts); }
  set textContent(text) { this.parts = [text]; }
  scrollIntoView() {}
  text() {
    const texts = this.parts.map((part) => (part instanceof Element ? part.text() : part));
    return texts.join("\\n");
  }
}
const page = new Element("main");
globalThis.document = {
  createElement: (tag) => new Element(tag),
  getElementById: (id) => (id === "page" ? page : null),
};
globalThis.location = { pathname: PATHNAME, hash: "" };
globalThis.window = { addEventListener: () => {} };
globalThis.fetch = async (url) => {
  console.log("fetched " + url);
  return { json: async () => (DOCUMENT) };
};
setTimeout(() => console.log(page.text()), 20);
"""


def run_page(document, pathname="/docs"):
    page = make_docs_response().body.decode()
    (script,) = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    browser = BROWSER.replace("PATHNAME", json.dumps(pathname))
    program = browser.replace("DOCUMENT", json.dumps(document)) + script
    ran = subprocess.run(
        [NODE, "-"], input=program, capture_output=True, text=True, timeout=30, check=True
    )
    return ran.stdout.splitlines()


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_the_page_shows_every_operation_and_every_object():
    document = build_openapi(has_admin=False)

    lines = run_page(document)

    for operation in OPERATIONS:
        assert operation.path in lines
        assert operation.summary in lines
    assert document["components"]["schemas"].keys() <= set(lines)
    for field in ("messages", "peft", "loglikelihood", "stop_reason"):
        assert field in lines
    assert "undefined" not in " ".join(lines)


@pytest.mark.skipif(NODE is None, reason="needs node")
@pytest.mark.parametrize(
    ("pathname", "url"),
    [
        ("/docs", "/openapi.json"),
        ("/docs/", "/openapi.json"),
        ("/llm/docs", "/llm/openapi.json"),
    ],
)
def test_the_page_fetches_the_document_beside_it(pathname, url):
    assert run_page(build_openapi(has_admin=False), pathname)[0] == f"fetched {url}"
