// Images for a message: read, made smaller, and turned into data: URLs.

export const MAX_IMAGES = 8;
const MAX_FILE = 32 << 20;
/** Models read images at less than this. */
const MAX_SIDE = 1568;

/** @throws {Error} the file is too large or no image that this browser reads */
export async function readImage(file) {
  if (file.size > MAX_FILE) throw new Error("too large");
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  // JPEG has no transparency.
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas.toDataURL("image/jpeg", 0.9);
}
