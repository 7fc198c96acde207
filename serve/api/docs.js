// Every address here is relative to the page: it works behind a proxy that adds a prefix, through
// a tunnel and on another port.
"use strict";

const KEY = "modelyard-token";
const form = document.getElementById("token");
const token = () => sessionStorage.getItem(KEY) || "";

// The other APIs are on other ports of the same host, as it numbers them. Where this page came
// by another port, there is a proxy or a tunnel in between, and these remain names.
const nav = document.querySelector("nav");
if (location.port === nav.dataset.port) {
  for (const link of nav.querySelectorAll("a[data-port]")) {
    const there = new URL("docs", location.href);
    there.port = link.dataset.port;
    link.href = there.href;
  }
}

form.token.value = token();
form.hidden = !token();
form.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, form.token.value.trim());
  location.reload();
});

const headers = () => (token() ? { Authorization: `Bearer ${token()}` } : {});

async function start() {
  const answer = await fetch("openapi.json", { headers: headers() });
  if (!answer.ok) {
    form.hidden = false;
    document.getElementById("swagger-ui").textContent = (await answer.json()).message;
    return;
  }
  SwaggerUIBundle({
    url: "openapi.json",
    dom_id: "#swagger-ui",
    deepLinking: true,
    presets: [SwaggerUIBundle.presets.apis, SwaggerUIBundle.SwaggerUIStandalonePreset],
    requestInterceptor: (request) => {
      Object.assign(request.headers, headers());
      return request;
    },
    responseInterceptor: (response) => {
      if (response.status === 401) form.hidden = false;
      return response;
    },
  });
}

start();
