/* Search in pages opened as files (file://), where browsers start no workers: the worker's script runs in a hidden frame. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const base = new URL(url, location.href);
      this.ready = new Promise((resolve) => {
        const frame = document.createElement("iframe");
        frame.hidden = true;
        document.body.appendChild(frame);
        const page = frame.contentWindow;
        page.document.open();
        page.document.write("<!doctype html><html><body></body></html>");
        page.document.close();
        /* What the worker posts arrives here; `importScripts` loads one script after another. */
        page.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        page.importScripts = (...names) => names.reduce((done, name) => done.then(() => load(name)), Promise.resolve());
        const load = (name) => new Promise((loaded, failed) => {
          const script = page.document.createElement("script");
          script.src = new URL(name, base);
          script.onload = loaded;
          script.onerror = failed;
          page.document.body.appendChild(script);
        });
        load(base).then(() => resolve(page));
      });
      this.addEventListener("message", (event) => this.onmessage && this.onmessage(event));
    }
    postMessage(data) {
      this.ready.then((page) => page.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
