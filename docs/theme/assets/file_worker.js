// A page that is opened from a file may start no Worker, and the search runs in one.
// There its script runs in a hidden frame, which gets and sends the same messages.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.append(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data => {
        this.dispatchEvent(new MessageEvent("message", { data }))
      }
      this.inside.importScripts = (...urls) => Promise.all(urls.map(each => this.load(each)))
      this.ready = this.load(url)
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.inside.document.createElement("script")
        Object.assign(script, { src: url, onload: resolve, onerror: reject })
        this.inside.document.documentElement.append(script)
      })
    }

    postMessage(data) {
      this.ready.then(() => {
        this.inside.dispatchEvent(new MessageEvent("message", { data }))
      })
    }

    terminate() {
      this.inside.frameElement.remove()
    }
  }
}
