for (const one of document.querySelectorAll(".wipe input")) one.addEventListener("input", () => {
  for (const each of document.querySelectorAll(".wipe input")) each.value = one.value;
  for (const each of document.querySelectorAll(".over"))
    each.style.clipPath = "inset(0 0 0 " + one.value + "%)";
});
