# The developer's commands; each is a script that says what it does.
.PHONY: help install demo test nightly mutants coverage matrix bench soak sbom site release check lint lock

help: ## list these commands
	@sed -n 's/^\([a-z]*\):[^#]*## /make \1	/p' Makefile | expand -t 16

install: ## make .venv from the lock files
	@scripts/install

demo: install ## export, archive, serve and explain the digits model; leaves nothing running
	@scripts/demo

test: install ## run the tests
	@scripts/test

nightly: install ## run the tests that take long: every pair of a matrix, large networks, long loads
	@scripts/nightly

mutants: install ## break single lines of the files that carry promises; list what no test notices
	@scripts/mutants

coverage: install ## run the tests and list which lines none of them entered
	@scripts/coverage

matrix: install ## run the tests on other Pythons and torches, and on the lowest versions; for nights
	@scripts/matrix

bench: install ## measure the server, beside bare loops and other servers; needs wrk
	@scripts/bench

soak: install ## load a server with everything at once for 20 minutes
	@scripts/soak

sbom: install ## write build/modelyard.cdx.json, the bill of materials of what is installed
	@mkdir -p build && .venv/bin/python -m modelyard.archiver.sbom >build/modelyard.cdx.json

site: install ## write build/site, the pages as a site that opens from the disk
	@scripts/site

release: install ## build what is published twice, compare, install and try it; uploads nothing
	@scripts/release

check: install ## format, lint, types, changelog
	@scripts/check

lint: install ## format and fix
	@scripts/lint

lock: install ## write requirements.lock anew
	@scripts/lock
