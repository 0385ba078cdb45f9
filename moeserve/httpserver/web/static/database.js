// What is kept in this browser (IndexedDB): a database for each kind of thing, with one store in it.

/** `transact(mode, use)` of a store: runs `use(store)`, which returns a request or nothing, and waits until what it did is
 *  on the disk. */
export function openStore(name, store) {
  let opening = null;

  function database() {
    opening ??= new Promise((resolve, reject) => {
      const request = indexedDB.open(name, 1);
      request.onupgradeneeded = () => request.result.createObjectStore(store, { keyPath: "id" });
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => reject(request.error);
    });
    return opening;
  }

  return async function transact(mode, use) {
    const transaction = (await database()).transaction(store, mode);
    const request = use(transaction.objectStore(store));
    return new Promise((resolve, reject) => {
      transaction.oncomplete = () => resolve(request?.result);
      transaction.onabort = transaction.onerror = () => reject(transaction.error);
    });
  };
}

/** Whether there was room for what `write()` writes. */
export async function hadRoom(write) {
  try {
    await write();
    return true;
  } catch (error) {
    if (error?.name !== "QuotaExceededError") throw error;
    return false;
  }
}
