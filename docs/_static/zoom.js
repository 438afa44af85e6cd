// Pictures open over the page when they are clicked: wheel or pinch to zoom, drag to move.
document.addEventListener("DOMContentLoaded", () => {
  const dialog = document.createElement("dialog");
  dialog.className = "zoom";
  const picture = document.createElement("img");
  dialog.append(picture);
  document.body.append(dialog);

  let scale, x, y;
  const held = new Map(); // pointers that are down, by id
  const show = () => {
    picture.style.transform = `translate(${x}px, ${y}px) scale(${scale})`;
  };
  const zoom = (factor) => {
    scale = Math.min(Math.max(scale * factor, 1), 12);
    if (scale === 1) x = y = 0;
    show();
  };
  const distance = () => {
    const [a, b] = [...held.values()];
    return Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY);
  };

  for (const image of document.querySelectorAll("article img")) {
    image.classList.add("zoomable");
    image.tabIndex = 0;
    image.title = "Enlarge";
    const open = () => {
      [picture.src, picture.alt] = [image.src, image.alt];
      [scale, x, y] = [1, 0, 0];
      show();
      dialog.showModal();
    };
    image.addEventListener("click", open);
    image.addEventListener("keydown", (event) => event.key === "Enter" && open());
  }

  let moved = false;
  dialog.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(event.deltaY < 0 ? 1.2 : 1 / 1.2);
  });
  dialog.addEventListener("pointerdown", (event) => {
    event.preventDefault();
    held.set(event.pointerId, event);
    moved = false;
  });
  dialog.addEventListener("pointermove", (event) => {
    const before = held.get(event.pointerId);
    if (!before) return;
    const apart = held.size === 2 ? distance() : 0;
    held.set(event.pointerId, event);
    if (held.size === 2) zoom(distance() / apart);
    x += event.clientX - before.clientX;
    y += event.clientY - before.clientY;
    moved ||= Math.abs(event.movementX) + Math.abs(event.movementY) > 1;
    show();
  });
  for (const name of ["pointerup", "pointercancel"]) {
    dialog.addEventListener(name, (event) => held.delete(event.pointerId));
  }
  dialog.addEventListener("click", () => moved || dialog.close());
  dialog.addEventListener("keydown", (event) => {
    event.stopPropagation(); // Sphinx's own keys: Escape is kept from dialogs, arrows turn pages
    if (event.key === "Escape") dialog.close();
  });
  dialog.addEventListener("dblclick", (event) => event.preventDefault());
});
