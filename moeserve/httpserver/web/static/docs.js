// The page of the API: Swagger's, of this server's own document, with the key that the other pages use.

import { apiKey, getJson } from "./api.js";
import { byId } from "./dom.js";
import { askForKey, awaitModel, followTheme, setUpKeyDialog, setUpTheme } from "./page.js";

async function show() {
  const problem = byId("problem");
  problem.hidden = true;
  try {
    const spec = await getJson("openapi.json");
    spec.servers = [{ url: new URL(".", location.href).pathname }]; // behind a proxy, paths may begin with another
    window.SwaggerUIBundle({
      spec,
      dom_id: "#api",
      docExpansion: "list",
      defaultModelsExpandDepth: 0,
      validatorUrl: null, // it is another site's
      requestInterceptor: withKey,
      onComplete: () => setTimeout(nameParts), // when it has been drawn
    });
  } catch (error) {
    problem.hidden = false;
    problem.textContent = error.message;
    if (error.status === 401) askForKey();
    return;
  }
  await awaitModel();
}

// For screen readers: Swagger leaves these without a name.
function nameParts() {
  for (const [part, name] of [[".information-container", "About this API"], [".schemes-server-container", "Server and keys"]]) {
    const node = document.querySelector(part);
    node?.setAttribute("role", "region");
    node?.setAttribute("aria-label", name);
  }
  document.getElementById("servers")?.setAttribute("aria-label", "Server");
}

function withKey(request) {
  if (apiKey.get() && !request.headers.Authorization) request.headers.Authorization = `Bearer ${apiKey.get()}`;
  return request;
}

setUpTheme();
followTheme((isDark) => document.documentElement.classList.toggle("dark-mode", isDark)); // Swagger's class
setUpKeyDialog(show);
addEventListener("DOMContentLoaded", show);
