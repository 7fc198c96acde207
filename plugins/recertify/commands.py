"""The subcommand; it names where its code lies, which is loaded when it runs."""

from modelyard.base.plugins import Command

RECERTIFY = Command(
    "modelyard.plugins.recertify.recertify_cli",
    "recertify_app",
    "Say which archives would answer otherwise on other versions.",
)
WEB_PAGE = Command(
    "modelyard.plugins.recertify.web_page_cli",
    "web_page_app",
    "Write a page that verifies a model in the browser, and predicts there.",
)
