"use strict";
// Figures: a click enlarges one over the whole window. Buttons, keys (+, -, 0), the wheel with Ctrl and a double click zoom;
// dragging and scrolling move; Escape closes.
(() => {
  const viewer = document.getElementById("viewer");
  const find = (name) => document.getElementById(`viewer-${name}`);
  const [view, title, picture] = [find("view"), find("title"), new Image()];
  const MOST = 12, OPENED = 1000;
  let scale = 1;

  // The width in pixels at which the whole picture is seen.
  const whole = () => Math.min(view.clientWidth, (view.clientHeight * picture.naturalWidth) / picture.naturalHeight);
  function zoom(to, at = { x: view.clientWidth / 2, y: view.clientHeight / 2 }) {
    const before = scale;
    scale = Math.min(Math.max(to, 1), MOST);
    const [left, top] = [(view.scrollLeft + at.x) / before, (view.scrollTop + at.y) / before];
    picture.style.width = `${whole() * scale}px`;
    view.scrollTo(left * scale - at.x, top * scale - at.y);
    viewer.dataset.scale = scale;
  }
  function open(figure) {
    const image = figure.querySelector("img");
    [picture.src, picture.alt] = [image.src, image.alt];
    title.textContent = figure.dataset.title;
    view.replaceChildren(picture);
    viewer.showModal();
    // A tall figure begins at its top, larger than where it stands in the page.
    picture.decode().then(() => {
      scale = 1;
      zoom(Math.min(view.clientWidth, OPENED) / whole(), { x: view.clientWidth / 2, y: 0 });
    });
  }

  for (const button of document.querySelectorAll(".enlarge")) {
    button.addEventListener("click", () => open(button.closest("figure")));
  }
  find("in").addEventListener("click", () => zoom(scale * 1.5));
  find("out").addEventListener("click", () => zoom(scale / 1.5));
  find("whole").addEventListener("click", () => zoom(1));
  find("close").addEventListener("click", () => viewer.close());
  viewer.addEventListener("close", () => view.replaceChildren());
  viewer.addEventListener("keydown", (event) => {
    const keys = { "+": () => zoom(scale * 1.5), "=": () => zoom(scale * 1.5), "-": () => zoom(scale / 1.5), 0: () => zoom(1) };
    if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  const place = (event) => {
    const box = view.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  view.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(scale * 1.25 ** -Math.sign(event.deltaY), place(event));
  }, { passive: false });
  view.addEventListener("dblclick", (event) => zoom(scale > 1 ? 1 : 3, place(event)));
  let drag = null;
  view.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "mouse") return;
    drag = { x: event.clientX + view.scrollLeft, y: event.clientY + view.scrollTop };
    view.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  view.addEventListener("pointermove", (event) => {
    if (drag) view.scrollTo(drag.x - event.clientX, drag.y - event.clientY);
  });
  const drop = () => { drag = null; };
  view.addEventListener("pointerup", drop);
  view.addEventListener("pointercancel", drop);
  window.addEventListener("resize", () => { if (viewer.open) zoom(scale); });
})();
